//! Texts by which two precisions are compared: sentences that read like what people embed, the same on every machine.
//!
//! Token ids drawn at random would do for time, since arithmetic does not look at them. Quality is another matter: what
//! rounding does to a vector depends on activations, and those of gibberish are not those of language. So sentences are put
//! together from a little grammar: twelve subjects that do something somewhere, of several lengths.

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const SEED: u64 = 5;
/// The longest text has this many sentences: with a dozen words each, about 128 tokens.
const SENTENCES_MOST: usize = 8;

const WHO: &[&str] = &[
    "the harbour pilot",
    "a customer in Lyon",
    "the night nurse",
    "our insurance broker",
    "a young cellist",
    "the maintenance crew",
    "the committee on fisheries",
    "a retired surveyor",
    "the compiler",
    "an orchard owner",
    "the defence lawyer",
    "a volunteer at the library",
];
const DOES: &[&str] = &[
    "asked for a refund of",
    "repaired",
    "wrote a long report about",
    "could not find",
    "sold",
    "measured the temperature of",
    "photographed",
    "refused to sign off",
    "translated the manual of",
    "dreamt of",
    "compared the price of",
    "finally understood",
];
const WHAT: &[&str] = &[
    "the broken heat pump",
    "a second-hand violin",
    "three crates of apples",
    "the quarterly balance sheet",
    "an undocumented function",
    "the old lighthouse",
    "a parcel that never arrived",
    "the new vaccination schedule",
    "two tickets to Osaka",
    "the boundary between the fields",
    "a recipe for rye bread",
    "the evidence in the case",
];
const WHEN: &[&str] = &[
    "before the storm",
    "on a rainy Tuesday",
    "during the board meeting",
    "after months of waiting",
    "at half past four",
    "while the trains stood still",
    "in the last week of March",
    "without telling anyone",
];

/// So many texts.
pub(crate) fn sentences(count: usize) -> Vec<String> {
    let mut random = SmallRng::seed_from_u64(SEED);
    (0..count).map(|_| text(&mut random)).collect()
}

fn text(random: &mut SmallRng) -> String {
    // Half of the texts are one sentence, a quarter two: as with what people embed, most are short.
    let mut sentences = vec![sentence(random)];
    while sentences.len() < SENTENCES_MOST && random.random_bool(0.5) {
        sentences.push(sentence(random));
    }
    sentences.join(" ")
}

fn sentence(random: &mut SmallRng) -> String {
    let mut pick = |of: &[&'static str]| *of.choose(random).expect("a list with words");
    let (who, does, what, when) = (pick(WHO), pick(DOES), pick(WHAT), pick(WHEN));
    let mut sentence = format!("{who} {does} {what} {when}.");
    if let Some(first) = sentence.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    sentence
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn texts_differ_and_are_the_same_in_every_run() {
        let texts = sentences(500);
        assert_eq!(texts, sentences(500));
        let different: BTreeSet<&String> = texts.iter().collect();
        assert!(different.len() > 480, "{}", different.len());
        let words = |text: &String| text.split(' ').count();
        assert!(texts.iter().map(words).max() > Some(60) && texts.iter().map(words).min() < Some(12));
    }
}
