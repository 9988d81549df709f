//! Spelling suggestions ("did you mean …"): the known words closest to an unknown one.

/// Maximum number of suggestions.
pub const MAX_SUGGESTIONS: usize = 3;

/// Minimum length of a word that suggests a longer or shorter form of it.
const STEM_MIN: usize = 3;

/// Returns the words of `known` within a small edit distance of `given`, nearest first, ties in the order of `known`. If there is
/// none, those of which one is the other with further letters (`warning`, `warn`).
pub fn nearest<'k>(given: &str, known: impl IntoIterator<Item = &'k str>) -> Vec<&'k str> {
    // At most a third of the letters may differ, and at least one and at most four.
    let tolerated = (given.chars().count() / 3).clamp(1, 4);
    let is_near = |(edits, word): &(usize, &str)| *edits <= tolerated || is_form(given, word);
    let mut near: Vec<(usize, &str)> =
        known.into_iter().map(|word| (edits(given, word), word)).filter(is_near).collect();
    if near.iter().any(|(edits, _)| *edits <= tolerated) {
        near.retain(|(edits, _)| *edits <= tolerated);
    }
    near.sort_by_key(|(edits, _)| *edits);
    near.truncate(MAX_SUGGESTIONS);
    near.into_iter().map(|(_, word)| word).collect()
}

/// Returns whether one of two words is the other with further letters, ignoring case.
fn is_form(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let (short, long) = if a.len() < b.len() { (a, b) } else { (b, a) };
    let further = long.strip_prefix(&short);
    short.len() >= STEM_MIN && further.is_some_and(|rest| rest.chars().all(char::is_alphabetic))
}

/// Formats `; did you mean a or b?`, or an empty string if no word is close.
pub fn did_you_mean<'k>(given: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    match nearest(given, known).as_slice() {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(" or ")),
    }
}

/// Returns the optimal string alignment distance of two words, ignoring case: the number of letters to insert, delete,
/// replace or swap with their neighbour.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) =
        (a.to_lowercase().chars().collect(), b.to_lowercase().chars().collect());
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_word_finds_the_intended_one() {
        let known = ["aws/us-east-1", "aws/us-west-1", "gcp/us-east1", "embed", "rerank"];
        let cases = [
            ("aws/us-east1", vec!["aws/us-east-1", "aws/us-west-1", "gcp/us-east1"]),
            ("AWS/US-WEST-1", vec!["aws/us-west-1", "aws/us-east-1"]),
            ("embde", vec!["embed"]),
            ("classify", vec![]),
            ("mebde", vec![]),
            ("aws", vec![]),
        ];
        for (given, expected) in cases {
            assert_eq!(nearest(given, known), expected, "{given}");
        }
        let levels = ["error", "warn", "info", "debug"];
        for (given, level) in
            [("warning", "warn"), ("Err", "error"), ("information", "info"), ("inof", "info")]
        {
            assert_eq!(nearest(given, levels), [level], "{given}");
        }
        assert_eq!(nearest("verbose", levels), [""; 0]);
        assert_eq!(nearest("ue", ["de", "eea", "eu"]), ["de", "eu"]);
        assert_eq!(did_you_mean("embd", known), "; did you mean embed?");
        assert_eq!(did_you_mean("classify", known), "");
    }

    #[test]
    fn the_edit_distance_counts_insertions_deletions_replacements_and_swaps() {
        for (a, b, expected) in
            [("", "abc", 3), ("abc", "acb", 1), ("abc", "ABC", 0), ("kitten", "sitting", 3)]
        {
            assert_eq!(edits(a, b), expected, "{a} {b}");
            assert_eq!(edits(b, a), expected, "{b} {a}");
        }
    }
}
