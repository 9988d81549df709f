//! Generated texts: common words, in the number that gives the desired token count.
//!
//! A tokenizer of the BERT family keeps each of these words whole and adds two tokens per text, so a text of n words
//! has n + 2 tokens. Other tokenizers differ by a few percent.

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

/// Special tokens that a tokenizer adds to a text.
const TOKENS_AROUND: usize = 2;

/// Median of the log-normal distribution, and standard deviation of the logarithm: most texts are a sentence or two,
/// and one in fifty exceeds the upper limit of [`MIXED_TOKENS`].
const MIXED_MEDIAN: f64 = 40.0;
const MIXED_SIGMA: f64 = 0.9;
const MIXED_TOKENS: std::ops::RangeInclusive<usize> = 8..=256;

/// Common words, so that a tokenizer meets whole words as in practice.
const WORDS: &str = "account address agreement answer article balance battery board bridge budget camera canal card \
    castle chapter city claim clock coast coffee colour contract copper course credit customer delay delivery desk \
    detail distance doctor door energy engine error evening field filter flight forest garden glass harbour history \
    hotel house idea insurance invoice island journey kitchen lake language laptop lesson letter library light limit \
    market meeting message method minute mountain network notice office order package paper passenger password payment \
    phone picture plant policy price printer problem product project question quick receipt record refund report result \
    return river road room sample school screen season second service shipping signal small station storm story street \
    subscription summer support table ticket today train travel update village warranty water weather window winter";

/// Distribution of text lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TextLengths {
    /// A search query: 8 to 16 tokens.
    Query,
    /// A paragraph: 128 tokens.
    Passage,
    /// Mixed texts: log-normal, median 40, 8 to 256 tokens.
    Mixed,
    /// Fixed number of tokens.
    Exactly(usize),
}

impl TextLengths {
    /// Draws the token count of the next text.
    pub fn draw(self, rng: &mut SmallRng) -> usize {
        match self {
            TextLengths::Query => rng.random_range(8..=16),
            TextLengths::Passage => 128,
            TextLengths::Mixed => {
                let tokens = MIXED_MEDIAN * (MIXED_SIGMA * normal(rng)).exp();
                (tokens as usize).clamp(*MIXED_TOKENS.start(), *MIXED_TOKENS.end())
            }
            TextLengths::Exactly(tokens) => tokens,
        }
    }
}

/// Vocabulary of generated texts.
pub(crate) struct WordList(Vec<&'static str>);

impl WordList {
    pub(crate) fn new() -> WordList {
        WordList(WORDS.split_whitespace().collect())
    }

    /// Generates a text of this many tokens.
    pub(crate) fn text(&self, tokens: usize, rng: &mut SmallRng) -> String {
        let words = tokens.saturating_sub(TOKENS_AROUND).max(1);
        let chosen: Vec<&str> = (0..words).filter_map(|_| self.0.choose(rng).copied()).collect();
        chosen.join(" ")
    }
}

/// Draws from the standard normal distribution (Box-Muller).
pub(crate) fn normal(rng: &mut SmallRng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    // 1 - u is in (0, 1], where the logarithm is finite.
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn text_lengths_follow_their_distribution() {
        let mut rng = SmallRng::seed_from_u64(3);
        let mut draw = |lengths: TextLengths| {
            let mut drawn: Vec<usize> = (0..4000).map(|_| lengths.draw(&mut rng)).collect();
            drawn.sort_unstable();
            (drawn[0], drawn[2000], drawn[3999])
        };
        assert_eq!(draw(TextLengths::Query), (8, 12, 16));
        assert_eq!(draw(TextLengths::Passage), (128, 128, 128));
        let (least, median, most) = draw(TextLengths::Mixed);
        // The median of 4000 draws has a standard error of 2 %; four standard errors are allowed.
        assert!(least == 8 && (37..=43).contains(&median) && most == 256, "{least} {median} {most}");
        let text = WordList::new().text(10, &mut rng);
        assert_eq!(text.split(' ').count(), 8, "{text}");
    }
}
