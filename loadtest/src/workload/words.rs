//! Texts that are made up: everyday words, as many as a request should have tokens.
//!
//! A tokenizer of the BERT family keeps each of these words whole and adds two tokens around a text, so a text of n words
//! has n + 2 tokens. Other tokenizers come within some percent of that.

use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

/// What a tokenizer puts around a text.
const TOKENS_AROUND: usize = 2;

/// The median of the log-normal mix, and the standard deviation of its logarithm: most texts are a sentence or two, and
/// one in fifty is longer than [`MIXED_TOKENS`] lets through.
const MIXED_MEDIAN: f64 = 40.0;
const MIXED_SIGMA: f64 = 0.9;
const MIXED_TOKENS: std::ops::RangeInclusive<usize> = 8..=256;

/// Everyday words, so that a tokenizer sees whole words as it does in practice.
const WORDS: &str = "account address agreement answer article balance battery board bridge budget camera canal card \
    castle chapter city claim clock coast coffee colour contract copper course credit customer delay delivery desk \
    detail distance doctor door energy engine error evening field filter flight forest garden glass harbour history \
    hotel house idea insurance invoice island journey kitchen lake language laptop lesson letter library light limit \
    market meeting message method minute mountain network notice office order package paper passenger password payment \
    phone picture plant policy price printer problem product project question quick receipt record refund report result \
    return river road room sample school screen season second service shipping signal small station storm story street \
    subscription summer support table ticket today train travel update village warranty water weather window winter";

/// How long texts are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// A search query: 8 to 16 tokens.
    Lookup,
    /// A paragraph: 128 tokens.
    Passage,
    /// What people write: log-normal, median 40, 8 to 256 tokens.
    Mixed,
    /// So many tokens.
    Exactly(usize),
}

impl Lengths {
    /// The tokens of the next text.
    pub fn draw(self, rng: &mut SmallRng) -> usize {
        match self {
            Lengths::Lookup => rng.random_range(8..=16),
            Lengths::Passage => 128,
            Lengths::Mixed => {
                let tokens = MIXED_MEDIAN * (MIXED_SIGMA * normal(rng)).exp();
                (tokens as usize).clamp(*MIXED_TOKENS.start(), *MIXED_TOKENS.end())
            }
            Lengths::Exactly(tokens) => tokens,
        }
    }
}

/// Words that sentences are made of.
pub(crate) struct Words(Vec<&'static str>);

impl Words {
    pub(crate) fn new() -> Words {
        Words(WORDS.split_whitespace().collect())
    }

    /// A text of so many tokens.
    pub(crate) fn text(&self, tokens: usize, rng: &mut SmallRng) -> String {
        let words = tokens.saturating_sub(TOKENS_AROUND).max(1);
        let chosen: Vec<&str> = (0..words).filter_map(|_| self.0.choose(rng).copied()).collect();
        chosen.join(" ")
    }
}

/// One draw of a normal distribution of mean 0 and deviation 1 (Box and Muller).
pub(crate) fn normal(rng: &mut SmallRng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    // 1 - u lies in (0, 1], where the logarithm is finite.
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn texts_have_the_lengths_of_what_they_stand_for() {
        let mut rng = SmallRng::seed_from_u64(3);
        let mut draw = |lengths: Lengths| {
            let mut drawn: Vec<usize> = (0..4000).map(|_| lengths.draw(&mut rng)).collect();
            drawn.sort_unstable();
            (drawn[0], drawn[2000], drawn[3999])
        };
        assert_eq!(draw(Lengths::Lookup), (8, 12, 16));
        assert_eq!(draw(Lengths::Passage), (128, 128, 128));
        let (least, median, most) = draw(Lengths::Mixed);
        // The median of 4000 draws scatters by 2 %; four of those are allowed.
        assert!(least == 8 && (37..=43).contains(&median) && most == 256, "{least} {median} {most}");
        let text = Words::new().text(10, &mut rng);
        assert_eq!(text.split(' ').count(), 8, "{text}");
    }
}
