//! From the answers of pieces to one answer.
//!
//! Each piece's answer is read by itself ([`Part::read`]), as soon as it is there and on whichever thread: where its list
//! stands, whether it has an element for each input, and its elements with their indices counted on. What is left to do
//! in order ([`Join`]) is to put bytes after one another:
//!
//! ```text
//!  {"object":"list","data":[ row 0, … ],"model":"m","usage":{"prompt_tokens":30,…}}
//!  ╰── before, of part 0 ──╯╰ elements ╯╰── after, of part 0, with sums ──────────╯
//!                            ╰ of part 1, … ╯
//! ```
//!
//! So the beginning of an answer can go to the client before its end is there. Ranks cannot: the best document may be in
//! the last piece. They are small, are merged by score when all are there, and cut to the best `top_n`; each piece was
//! asked for its own best `top_n`, and no document is among the best of all that is not among those of its piece.
//!
//! No number of a vector is read; a score is, to compare it, and is written as it came. An answer that is not what its
//! path promises (an element too few, an index out of place) is no answer, and joining says so instead of giving input
//! *i* the row of another.

use super::json::{self, Kind, Span, Value};
use super::{REPLICA_INPUTS_MAX, Shape};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Members of an answer, and of an element of one.
const MEMBERS_MAX: usize = 64;
/// Documents that Cohere bills as one search; the sum over pieces would count each one that was begun.
const DOCUMENTS_PER_SEARCH_UNIT: usize = 100;

/// An answer that is not what its path promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotJoinable {
    /// What is wrong with it.
    pub why: &'static str,
}

const fn not(why: &'static str) -> NotJoinable {
    NotJoinable { why }
}

/// The answer to one piece, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Up to its list, the opening bracket included.
    before: Vec<u8>,
    /// From the closing bracket on.
    after: Vec<u8>,
    /// Numbers in `after` that are not those of one piece.
    totals: Vec<Total>,
    list: Listed,
}

/// A number that joining changes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Total {
    /// Where it stands.
    span: Span,
    kind: TotalKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TotalKind {
    /// A member of `usage`, of which each piece has its own.
    Usage { name: Vec<u8>, of_piece: u64 },
    /// `meta.billed_units.search_units`.
    SearchUnits,
}

#[derive(Clone, Debug, PartialEq)]
enum Listed {
    /// Elements in order, with commas between them.
    InOrder(Vec<u8>),
    /// The best first.
    Ranked(Vec<Rank>),
}

/// One document's rank.
#[derive(Clone, Debug, PartialEq)]
struct Rank {
    score: f64,
    /// Among all documents.
    index: usize,
    element: Vec<u8>,
}

impl Part {
    /// Reads the answer to the piece of `inputs` inputs of which the first is the `first` of all.
    pub fn read(shape: Shape, answer: &[u8], inputs: usize, first: usize) -> Result<Part, NotJoinable> {
        assert!(0 < inputs && inputs <= REPLICA_INPUTS_MAX, "a piece is what a replica takes");
        let around = Around::of(shape, answer)?;
        let list = match shape {
            Shape::Rows => in_order(answer, &around.list, inputs, |_, _| Ok(None), first)?,
            Shape::Data => {
                in_order(answer, &around.list, inputs, |element, at| index_at(answer, element, at), first)?
            }
            Shape::Ranks => ranked(answer, &around.list, "score", inputs, first)?,
            Shape::Results => ranked(answer, &around.list, "relevance_score", inputs, first)?,
        };
        let (opened, closes) = (around.list.start + 1, around.list.end - 1);
        let mut totals = around.totals;
        for total in &mut totals {
            if total.span.start < closes {
                return Err(not("its usage stands before its list"));
            }
            total.span = total.span.start - closes..total.span.end - closes;
        }
        Ok(Part { before: answer[..opened].to_vec(), after: answer[closes..].to_vec(), totals, list })
    }

    /// Bytes that it takes to keep.
    pub fn bytes(&self) -> usize {
        let list = match &self.list {
            Listed::InOrder(elements) => elements.len(),
            Listed::Ranked(ranks) => {
                ranks.iter().map(|rank| rank.element.len() + std::mem::size_of::<Rank>()).sum()
            }
        };
        self.before.len() + self.after.len() + list
    }
}

/// Where the list stands, and the numbers beside it that joining changes.
struct Around {
    list: Span,
    totals: Vec<Total>,
}

impl Around {
    fn of(shape: Shape, answer: &[u8]) -> Result<Around, NotJoinable> {
        let whole = json::whole(answer).ok_or(not("it is not JSON"))?;
        let name = match shape {
            Shape::Rows | Shape::Ranks if answer[whole.start] == b'[' => {
                return Ok(Around { list: whole, totals: Vec::new() });
            }
            Shape::Rows | Shape::Ranks => return Err(not("it is not a list")),
            Shape::Data => "data",
            Shape::Results => "results",
        };
        let members = json::members(answer, &whole, MEMBERS_MAX).ok_or(not("it is not an object"))?;
        let member = |name: &str| members.iter().find(|member| member.is(answer, name));
        let list =
            member(name).filter(|member| member.value.kind == Kind::List).ok_or(not("it has no list"))?;
        let mut totals = Vec::new();
        if let Some(usage) = member("usage") {
            let usage =
                json::members(answer, &usage.value.span, MEMBERS_MAX).ok_or(not("its usage is none"))?;
            for member in usage {
                if let Some(of_piece) = number(answer, &member.value.span) {
                    let kind = TotalKind::Usage { name: member.key(answer).to_vec(), of_piece };
                    totals.push(Total { span: member.value.span, kind });
                }
            }
        }
        if let Some(span) = member("meta").and_then(|meta| search_units(answer, &meta.value.span)) {
            totals.push(Total { span, kind: TotalKind::SearchUnits });
        }
        totals.sort_by_key(|total| total.span.start);
        Ok(Around { list: list.value.span.clone(), totals })
    }
}

fn search_units(answer: &[u8], meta: &Span) -> Option<Span> {
    let inside = |span: &Span, name: &str| {
        let members = json::members(answer, span, MEMBERS_MAX)?;
        members.into_iter().find(|member| member.is(answer, name)).map(|member| member.value.span)
    };
    inside(&inside(meta, "billed_units")?, "search_units")
}

fn number<T: std::str::FromStr>(answer: &[u8], span: &Span) -> Option<T> {
    std::str::from_utf8(&answer[span.clone()]).ok()?.parse().ok()
}

/// The elements of a list that has one for each input, in order. `index_of` says where an element has its index.
fn in_order(
    answer: &[u8],
    list: &Span,
    inputs: usize,
    index_of: impl Fn(&Value, usize) -> Result<Option<Span>, NotJoinable>,
    first: usize,
) -> Result<Listed, NotJoinable> {
    let (mut elements, mut count) = (Vec::with_capacity(list.len() + inputs * 4), 0);
    let mut wrong = None;
    json::elements(answer, list, |element| {
        if count > 0 {
            elements.push(b',');
        }
        match index_of(&element, count) {
            Ok(index) => counted_on(answer, &element, index, first + count, &mut elements),
            Err(why) => wrong = Some(why),
        }
        count += 1;
    })
    .ok_or(not("its list is not JSON"))?;
    match wrong {
        Some(why) => Err(why),
        None if count != inputs => Err(not("it has not one element for each input")),
        None => Ok(Listed::InOrder(elements)),
    }
}

/// Where an element has its index, which must be `at`.
fn index_at(answer: &[u8], element: &Value, at: usize) -> Result<Option<Span>, NotJoinable> {
    let index = index(answer, element)?;
    if number(answer, &index) == Some(at) {
        Ok(Some(index))
    } else {
        Err(not("its elements are out of order"))
    }
}

fn index(answer: &[u8], element: &Value) -> Result<Span, NotJoinable> {
    let members =
        json::members(answer, &element.span, MEMBERS_MAX).ok_or(not("an element is not an object"))?;
    let index = members.into_iter().find(|member| member.is(answer, "index"));
    index.map(|index| index.value.span).ok_or(not("an element has no index"))
}

/// Writes an element with another index, where it has one.
fn counted_on(answer: &[u8], element: &Value, index: Option<Span>, counted: usize, out: &mut Vec<u8>) {
    let Span { start, end } = element.span;
    match index {
        None => out.extend_from_slice(&answer[start..end]),
        Some(index) => {
            out.extend_from_slice(&answer[start..index.start]);
            out.extend_from_slice(counted.to_string().as_bytes());
            out.extend_from_slice(&answer[index.end..end]);
        }
    }
}

/// The elements of a list of ranks: each of another input, the best first.
fn ranked(
    answer: &[u8],
    list: &Span,
    score: &str,
    inputs: usize,
    first: usize,
) -> Result<Listed, NotJoinable> {
    let mut ranks: Vec<Rank> = Vec::new();
    let mut seen = vec![false; inputs];
    let mut read = |element: Value| {
        let place = index(answer, &element)?;
        let at = number::<usize>(answer, &place).filter(|at| *at < inputs);
        let at = at.ok_or(not("it ranks what was not asked"))?;
        if std::mem::replace(&mut seen[at], true) {
            return Err(not("it ranks a document twice"));
        }
        let members = json::members(answer, &element.span, MEMBERS_MAX).unwrap_or_default();
        let score = members.iter().find(|member| member.is(answer, score));
        let score = score.and_then(|score| number::<f64>(answer, &score.value.span));
        let score = score.ok_or(not("an element has no score"))?;
        let mut bytes = Vec::with_capacity(element.span.len() + 6);
        counted_on(answer, &element, Some(place), first + at, &mut bytes);
        ranks.push(Rank { score, index: first + at, element: bytes });
        Ok(())
    };
    let mut wrong = Ok(());
    json::elements(answer, list, |element| {
        if wrong.is_ok() {
            wrong = read(element);
        }
    })
    .ok_or(not("its list is not JSON"))?;
    wrong?;
    Ok(Listed::Ranked(ranks))
}

/// The parts, put together in order.
#[derive(Debug)]
pub struct Join {
    inputs: usize,
    top_n: Option<u64>,
    parts: usize,
    /// What comes after the list, of the first part.
    after: Vec<u8>,
    totals: Vec<Total>,
    sums: BTreeMap<Vec<u8>, u64>,
    ranks: Vec<std::vec::IntoIter<Rank>>,
}

impl Join {
    /// Of the answers to a request of so many inputs, of which the best `top_n` are wanted if they are ranked.
    pub fn new(inputs: usize, top_n: Option<u64>) -> Join {
        Join {
            inputs,
            top_n,
            parts: 0,
            after: Vec::new(),
            totals: Vec::new(),
            sums: BTreeMap::new(),
            ranks: Vec::new(),
        }
    }

    /// The next part, in the order of the inputs; what of the answer is known now is appended to `out`.
    pub fn push(&mut self, part: Part, out: &mut Vec<Vec<u8>>) {
        let Part { before, after, totals, list } = part;
        for total in &totals {
            if let TotalKind::Usage { name, of_piece } = &total.kind {
                let sum = self.sums.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*of_piece);
            }
        }
        let first = self.parts == 0;
        self.parts += 1;
        if first {
            (self.after, self.totals) = (after, totals);
            out.push(before);
        }
        match list {
            Listed::InOrder(elements) => {
                if !first {
                    out.push(b",".to_vec());
                }
                out.push(elements);
            }
            Listed::Ranked(ranks) => self.ranks.push(ranks.into_iter()),
        }
    }

    /// All parts are there: the rest of the answer is appended to `out`.
    pub fn finish(mut self, out: &mut Vec<Vec<u8>>) {
        let ranks = self.merged();
        if !ranks.is_empty() {
            out.push(ranks);
        }
        let (mut rest, mut at) = (Vec::with_capacity(self.after.len() + 16), 0);
        for Total { span, kind } in &self.totals {
            let total = match kind {
                TotalKind::Usage { name, of_piece: _ } => self.sums.get(name).copied().unwrap_or(0),
                TotalKind::SearchUnits => self.inputs.div_ceil(DOCUMENTS_PER_SEARCH_UNIT) as u64,
            };
            rest.extend_from_slice(&self.after[at..span.start]);
            rest.extend_from_slice(total.to_string().as_bytes());
            at = span.end;
        }
        rest.extend_from_slice(&self.after[at..]);
        out.push(rest);
    }

    /// All ranks, the best first, ties by index. Within a piece they stay in the order that the replica gave them, which
    /// knows more digits than it shows.
    fn merged(&mut self) -> Vec<u8> {
        let most = self.top_n.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let mut merged = Vec::new();
        for _ in 0..most {
            let heads = self.ranks.iter_mut().filter(|ranks| !ranks.as_slice().is_empty());
            let best = heads.min_by(|a, b| better(&a.as_slice()[0], &b.as_slice()[0]));
            let Some(rank) = best.and_then(Iterator::next) else { break };
            if !merged.is_empty() {
                merged.push(b',');
            }
            merged.extend_from_slice(&rank.element);
        }
        merged
    }
}

fn better(a: &Rank, b: &Rank) -> Ordering {
    b.score.total_cmp(&a.score).then(a.index.cmp(&b.index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    /// Joins the answers to pieces of so many inputs.
    fn join(shape: Shape, answers: &[(usize, String)], top_n: Option<u64>) -> Result<String, &'static str> {
        let inputs = answers.iter().map(|(inputs, _)| inputs).sum();
        let (mut join, mut out, mut first) = (Join::new(inputs, top_n), Vec::new(), 0);
        for (inputs, answer) in answers {
            let part = Part::read(shape, answer.as_bytes(), *inputs, first).map_err(|not| not.why)?;
            assert!(part.bytes() >= answer.len() / 2, "what is kept is counted");
            join.push(part, &mut out);
            first += inputs;
        }
        join.finish(&mut out);
        Ok(String::from_utf8(out.concat()).expect("what was UTF-8 is UTF-8"))
    }

    fn check(shape: Shape, answers: &[(usize, &str)], top_n: Option<u64>, expected: &str) {
        let answers: Vec<_> =
            answers.iter().map(|(inputs, answer)| (*inputs, (*answer).to_owned())).collect();
        assert_eq!(join(shape, &answers, top_n).as_deref(), Ok(expected));
        serde_json::from_str::<Json>(expected).expect("what is expected is JSON");
    }

    #[test]
    fn vectors_come_in_order_with_their_indices_and_the_sum_of_usage() {
        check(
            Shape::Data,
            &[
                (
                    2,
                    r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.10,-1e-7]},{"object":"embedding","index":1,"embedding":[2]}],"model":"m","usage":{"prompt_tokens":30,"total_tokens":31}}"#,
                ),
                (
                    1,
                    r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":"AACAPw=="}],"model":"m","usage":{"prompt_tokens":5,"total_tokens":6}}"#,
                ),
            ],
            None,
            r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.10,-1e-7]},{"object":"embedding","index":1,"embedding":[2]},{"object":"embedding","index":2,"embedding":"AACAPw=="}],"model":"m","usage":{"prompt_tokens":35,"total_tokens":37}}"#,
        );
    }

    #[test]
    fn lists_without_anything_around_them_are_put_after_one_another() {
        check(Shape::Rows, &[(2, "[[1.0], [2.50]]"), (1, " [[3]]\n")], None, "[[1.0],[2.50],[3]]");
        check(Shape::Rows, &[(1, "[0.5]"), (2, "[1e-9,-1]")], None, "[0.5,1e-9,-1]");
        let yes = r#"[{"score":0.75,"label":"yes, [index]"}]"#;
        check(
            Shape::Rows,
            &[(1, &format!("[{yes}]")), (1, &format!("[{yes}]"))],
            None,
            &format!("[{yes},{yes}]"),
        );
    }

    #[test]
    fn ranks_are_those_of_all_documents_the_best_first() {
        let answers = [
            (2, r#"[{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.5,"text":"a"}]"#),
            (2, r#"[{"index":0,"score":0.95,"text":"c"},{"index":1,"score":0.5,"text":"d"}]"#),
        ];
        check(
            Shape::Ranks,
            &answers,
            None,
            r#"[{"index":2,"score":0.95,"text":"c"},{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.5,"text":"a"},{"index":3,"score":0.5,"text":"d"}]"#,
        );
    }

    #[test]
    fn of_results_the_best_come_back_and_searches_are_counted_once() {
        let answer = |results: &str, tokens: u64| {
            format!(
                r#"{{"id":"r","model":"m","results":[{results}],"meta":{{"api_version":{{"version":"2"}},"billed_units":{{"search_units":1}}}},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}"#
            )
        };
        let documents = [
            r#"{"index":0,"relevance_score":0.2,"document":{"index":7,"text":"a"}}"#,
            r#"{"index":49,"relevance_score":1e-2,"document":{"text":"z"}}"#,
            r#"{"index":3,"relevance_score":0.30,"document":{"relevance_score":9}}"#,
        ];
        let first = answer(&[documents[0], documents[1]].join(","), 10);
        let expected = answer(
            r#"{"index":53,"relevance_score":0.30,"document":{"relevance_score":9}},{"index":0,"relevance_score":0.2,"document":{"index":7,"text":"a"}}"#,
            17,
        );
        check(Shape::Results, &[(50, &first), (50, &answer(documents[2], 7))], Some(2), &expected);
        let more = join(Shape::Results, &[(50, first), (51, answer("", 7))], None).expect("an answer");
        assert!(more.contains(r#""search_units":2"#) && more.contains(r#""index":49"#), "{more}");
    }

    #[test]
    fn what_is_not_the_answer_to_a_piece_is_not_joined() {
        for (shape, inputs, answer, why) in [
            (Shape::Rows, 1, "", "it is not JSON"),
            (Shape::Rows, 1, "[[1]", "it is not JSON"),
            (Shape::Rows, 1, "{}", "it is not a list"),
            (Shape::Rows, 2, "[[1]]", "it has not one element for each input"),
            (Shape::Rows, 1, "[[1],[2]]", "it has not one element for each input"),
            (Shape::Rows, 2, "[[1] [2]]", "its list is not JSON"),
            (Shape::Data, 1, "[]", "it is not an object"),
            (Shape::Data, 1, r#"{"results":[]}"#, "it has no list"),
            (Shape::Data, 1, r#"{"data":{}}"#, "it has no list"),
            (Shape::Data, 1, r#"{"data":[[1]]}"#, "an element is not an object"),
            (Shape::Data, 1, r#"{"data":[{}]}"#, "an element has no index"),
            (Shape::Data, 1, r#"{"data":[{"index":1}]}"#, "its elements are out of order"),
            (Shape::Data, 2, r#"{"data":[{"index":0}]}"#, "it has not one element for each input"),
            (Shape::Data, 1, r#"{"data":[{"index":0}],"usage":3}"#, "its usage is none"),
            (Shape::Data, 1, r#"{"usage":{"a":1},"data":[{"index":0}]}"#, "its usage stands before its list"),
            (Shape::Ranks, 2, r#"[{"index":2,"score":1}]"#, "it ranks what was not asked"),
            (
                Shape::Ranks,
                2,
                r#"[{"index":0,"score":1},{"index":0,"score":1}]"#,
                "it ranks a document twice",
            ),
            (Shape::Ranks, 1, r#"[{"index":0}]"#, "an element has no score"),
            (Shape::Results, 1, r#"{"results":[{"index":0,"score":1}]}"#, "an element has no score"),
        ] {
            assert_eq!(join(shape, &[(inputs, answer.to_owned())], None), Err(why), "{answer}");
        }
    }

    proptest! {
        /// Invariant 3, Order and identity: what is joined is what one piece would have answered.
        #[test]
        fn pieces_of_rows_join_to_the_whole(
            pieces in prop::collection::vec(prop::collection::vec(any::<i32>(), 1..6), 1..6),
            strings: bool,
        ) {
            let row = |index: usize, value: &i32| {
                let embedding = if strings { json!(format!("{value}]\"[")) } else { json!([value, 0.5]) };
                json!({"object": "embedding", "index": index, "embedding": embedding})
            };
            let answer = |rows: &[i32]| {
                let data: Vec<_> = rows.iter().enumerate().map(|(index, value)| row(index, value)).collect();
                json!({"data": data, "usage": {"total_tokens": rows.len() * 3, "cached": null}, "x": {"total_tokens": 1}})
            };
            let answers: Vec<_> = pieces.iter().map(|rows| (rows.len(), answer(rows).to_string())).collect();
            let joined: Json = serde_json::from_str(&join(Shape::Data, &answers, None).unwrap()).unwrap();
            prop_assert_eq!(joined, answer(&pieces.concat()));
            let rows = |rows: &[i32]| json!(rows.iter().map(|value| json!([value])).collect::<Vec<_>>());
            let answers: Vec<_> = pieces.iter().map(|piece| (piece.len(), rows(piece).to_string())).collect();
            let joined: Json = serde_json::from_str(&join(Shape::Rows, &answers, None).unwrap()).unwrap();
            prop_assert_eq!(joined, rows(&pieces.concat()));
        }

        /// Ranks of pieces, each cut to its best, merge to the best of all.
        #[test]
        fn pieces_of_ranks_join_to_the_ranks_of_all(
            pieces in prop::collection::vec(prop::collection::vec(0u8..20, 1..6), 1..6),
            top_n in prop::option::of(1usize..12),
        ) {
            let ranks = |scores: &[u8]| {
                let mut order: Vec<usize> = (0..scores.len()).collect();
                order.sort_by_key(|index| (std::cmp::Reverse(scores[*index]), *index));
                order.truncate(top_n.unwrap_or(usize::MAX));
                let rank = |index: usize| json!({"index": index, "score": f64::from(scores[index]) / 16.0});
                json!(order.into_iter().map(rank).collect::<Vec<_>>())
            };
            let answers: Vec<_> = pieces.iter().map(|scores| (scores.len(), ranks(scores).to_string())).collect();
            let joined = join(Shape::Ranks, &answers, top_n.map(|most| most as u64)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Json>(&joined).unwrap(), ranks(&pieces.concat()));
        }
    }
}
