"""Generated input texts of known length, made of common words.

Each word is one token of the model's vocabulary, so a text of n tokens has n - 2 words between the two special tokens.
Each peer tokenises the texts itself and gets exactly these lengths.
"""

import math
import random

SEED = 3
SPECIAL_TOKENS = 2

WORDS = """account address agreement answer article balance battery board bridge budget camera canal card castle chapter
city claim clock coast coffee contract copper course credit customer delay delivery desk detail distance doctor door
energy engine error evening field filter flight forest garden glass harbour history hotel house idea insurance island
journey kitchen lake language letter library light limit market meeting message method minute mountain network notice
office order package paper passenger payment phone picture plant policy price problem product project question quick
record report result river road room sample school screen season second service signal small station storm story street
summer support table ticket today train travel village water weather window winter""".split()


class Texts:
    """Generator of texts with a fixed seed, so that every run has the same texts."""

    def __init__(self, vocabulary):
        self.random = random.Random(SEED)
        self.words = [word for word in WORDS if word in vocabulary]
        if len(self.words) < len(WORDS) // 2:
            raise SystemExit("fewer than half of WORDS are in the model's vocabulary; replace the list")

    def of(self, tokens):
        return " ".join(self.random.choice(self.words) for _ in range(tokens - SPECIAL_TOKENS))

    def short(self, count):
        """Search queries of 8 to 16 tokens."""
        return [self.of(self.random.randint(8, 16)) for _ in range(count)]

    def passage(self, count):
        """Paragraphs of 128 tokens."""
        return [self.of(128) for _ in range(count)]

    def mixed(self, count):
        """Texts with lengths as in real traffic: log-normal with median 40, clamped to 8 to 256 tokens."""
        normal = (self.random.gauss(0.0, 0.8) for _ in range(count))
        return [self.of(int(min(max(40 * math.exp(z), 8), 256))) for z in normal]


def tokens_of(text):
    return len(text.split()) + SPECIAL_TOKENS
