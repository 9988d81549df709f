//! Responses of TEI's routes. They have no envelope: a list of vectors is a list of lists.

use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};

use crate::vectors::RowsView;

/// Writes `[[…], …]`: one vector per input.
pub fn write_rows(rows: RowsView<'_>) -> Vec<u8> {
    let mut json = Vec::with_capacity(16 + rows.numbers() * 12);
    serde_json::to_writer(&mut json, &RowList(rows)).expect("writing numbers to a Vec cannot fail");
    json
}

/// Writes `[[[…], …], …]`: `counts` vectors per input, one for each of its tokens.
pub fn write_token_rows(values: &[f32], width: usize, counts: &[u32]) -> Vec<u8> {
    struct Inputs<'a>(&'a [f32], usize, &'a [u32]);
    impl Serialize for Inputs<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let Inputs(mut values, width, counts) = *self;
            let mut list = serializer.serialize_seq(Some(counts.len()))?;
            for count in counts {
                let (rows, rest) = values.split_at(*count as usize * width);
                list.serialize_element(&RowList(RowsView::new(rows, width)))?;
                values = rest;
            }
            list.end()
        }
    }
    let mut json = Vec::with_capacity(16 + values.len() * 12);
    serde_json::to_writer(&mut json, &Inputs(values, width, counts))
        .expect("writing numbers to a Vec cannot fail");
    json
}

struct RowList<'a>(RowsView<'a>);

impl Serialize for RowList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter())
    }
}

/// Writes `[{"index", "score", "text"}, …]`, the best first. `order` contains indices of texts; scores and texts are in
/// the order of the request.
pub fn write_ranks(order: &[usize], scores: &[f32], texts: Option<&[String]>) -> Vec<u8> {
    #[derive(Serialize)]
    struct TeiRankItem<'a> {
        index: usize,
        score: f32,
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'a str>,
    }
    let rank = |index: &usize| {
        let text = texts.map(|texts| texts[*index].as_str());
        TeiRankItem { index: *index, score: scores[*index], text }
    };
    let ranks: Vec<TeiRankItem<'_>> = order.iter().map(rank).collect();
    serde_json::to_vec(&ranks).expect("strings and numbers serialise")
}

/// Format of the labels of a classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Labels<'a> {
    /// Names of the labels.
    pub names: &'a [String],
    /// Number of best labels per input; absent: all.
    pub top_k: Option<u64>,
    /// Whether the labels of a single input are written without the list of inputs.
    pub alone: bool,
}

/// Writes `[{"score", "label"}, …]`, the highest first, or a list of those.
pub fn write_predictions(rows: RowsView<'_>, labels: Labels<'_>) -> Vec<u8> {
    #[derive(Serialize)]
    struct Prediction<'a> {
        score: f32,
        label: &'a str,
    }
    let Labels { names, top_k, alone } = labels;
    let predictions = |row: &[f32]| -> Vec<Prediction<'_>> {
        let most = top_k.map_or(row.len(), |most| usize::try_from(most).unwrap_or(row.len()));
        let order = crate::ranking::ranking(row, most.min(row.len()));
        order.into_iter().map(|i| Prediction { score: row[i], label: &names[i] }).collect()
    };
    let mut all = rows.iter().map(predictions);
    let written = match (alone, all.next()) {
        (true, Some(only)) => serde_json::to_vec(&only),
        (_, first) => serde_json::to_vec(&first.into_iter().chain(all).collect::<Vec<_>>()),
    };
    written.expect("strings and numbers serialise")
}

/// One token of `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SimpleToken {
    /// Id of the token.
    pub id: u32,
    /// Text of the token; the name of a special token.
    pub text: String,
    /// Whether it is a special token, which is not in the text.
    pub special: bool,
    /// Start in the text, in bytes of UTF-8, as in TEI; absent for special tokens.
    pub start: Option<usize>,
    /// End in the text.
    pub stop: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(json: Vec<u8>) -> String {
        String::from_utf8(json).expect("JSON is UTF-8")
    }

    #[test]
    fn vectors_are_written_as_lists_without_envelope() {
        assert_eq!(text(write_rows(RowsView::new(&[1.0, 0.5, -2.0, 0.1], 2))), "[[1.0,0.5],[-2.0,0.1]]");
        let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(text(write_token_rows(&rows, 2, &[2, 1])), "[[[1.0,2.0],[3.0,4.0]],[[5.0,6.0]]]");
    }

    #[test]
    fn ranks_contain_their_index_and_optionally_the_text() {
        let texts = ["a".to_owned(), "b".to_owned()];
        assert_eq!(
            text(write_ranks(&[1, 0], &[0.25, 0.5], Some(&texts))),
            r#"[{"index":1,"score":0.5,"text":"b"},{"index":0,"score":0.25,"text":"a"}]"#
        );
        assert_eq!(text(write_ranks(&[1], &[0.25, 0.5], None)), r#"[{"index":1,"score":0.5}]"#);
    }

    #[test]
    fn predictions_are_sorted_and_nested_only_for_a_list() {
        let names = ["no".to_owned(), "yes".to_owned()];
        let labels = |top_k, alone| Labels { names: &names, top_k, alone };
        let rows = RowsView::new(&[0.25, 0.75], 2);
        let one = r#"[{"score":0.75,"label":"yes"},{"score":0.25,"label":"no"}]"#;
        assert_eq!(text(write_predictions(rows, labels(None, true))), one);
        assert_eq!(text(write_predictions(rows, labels(None, false))), format!("[{one}]"));
        let best = r#"[[{"score":0.75,"label":"yes"}]]"#;
        assert_eq!(text(write_predictions(rows, labels(Some(1), false))), best);
        assert_eq!(text(write_predictions(rows, labels(Some(9), true))), one);
        let two = RowsView::new(&[0.25, 0.75, 0.75, 0.25], 2);
        assert!(text(write_predictions(two, labels(None, false))).starts_with(&format!("[{one},")));
    }
}
