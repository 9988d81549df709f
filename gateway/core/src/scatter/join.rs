//! Join of the responses to sub-requests into one response.
//!
//! Each response is read by itself ([`PartialResponse::read`]), as soon as it is complete and on any thread: the
//! position of its list, a check that it has an element for each input, and its elements with shifted indices. The
//! remaining sequential work ([`ResponseJoiner`]) is concatenation of bytes:
//!
//! ```text
//!  {"object":"list","data":[ row 0, … ],"model":"m","usage":{"prompt_tokens":30,…}}
//!  ╰─ before, of part 0 ───╯╰ elements ╯╰─ after, of part 0, with sums ───────────╯
//!                            ╰ of part 1, … ╯
//! ```
//!
//! So the beginning of a response can be sent to the client before its end is available. Ranks cannot: the best
//! document may be in the last sub-request. They are small, are merged by score when all are available, and truncated
//! to the best `top_n`; each sub-request requests its own best `top_n`, and no document is among the best of all that
//! is not among those of its part.
//!
//! No number of a vector is parsed; a score is, for comparison, and is written as received. A response that is not what
//! its path promises (a missing element, a wrong index) is invalid, and the join reports that instead of assigning the
//! row of another input.

use super::json::{self, ByteSpan, Kind, MEMBERS_MAX, Value};
use replica_api::api::ResponseShape;
use replica_api::limits::MAX_INPUTS as REPLICA_INPUTS_MAX;
use replica_api::rerank::response::DOCUMENTS_PER_SEARCH_UNIT;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Invalid response to a sub-request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidResponse {
    /// Description of the mistake.
    pub reason: &'static str,
}

const fn invalid(reason: &'static str) -> InvalidResponse {
    InvalidResponse { reason }
}

/// Response to one sub-request, read.
#[derive(Clone, Debug, PartialEq)]
pub struct PartialResponse {
    /// Bytes up to its list, the opening bracket included.
    before: Vec<u8>,
    /// Bytes from the closing bracket on.
    after: Vec<u8>,
    /// Numbers in `after` that differ for the whole request.
    totals: Vec<UsageTotal>,
    list: ResponseList,
}

/// Number that the join replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UsageTotal {
    /// Position of the number.
    span: ByteSpan,
    kind: TotalKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TotalKind {
    /// A member of `usage`, to be summed.
    Usage { name: Vec<u8>, value: u64 },
    /// `meta.billed_units.search_units`.
    SearchUnits,
}

#[derive(Clone, Debug, PartialEq)]
enum ResponseList {
    /// Elements in order, with commas between them.
    InOrder(Vec<u8>),
    /// Best first.
    Ranked(Vec<ResponseRank>),
}

/// Rank of one document.
#[derive(Clone, Debug, PartialEq)]
struct ResponseRank {
    score: f64,
    /// Index among all documents.
    index: usize,
    element: Vec<u8>,
}

impl PartialResponse {
    /// Reads the response to a sub-request with `inputs` inputs, the first of which has the index `first` in the whole
    /// request.
    pub fn read(
        shape: ResponseShape,
        response: &[u8],
        inputs: usize,
        first: usize,
    ) -> Result<PartialResponse, InvalidResponse> {
        assert!(
            0 < inputs && inputs <= REPLICA_INPUTS_MAX,
            "a sub-request has at most the inputs that a replica accepts"
        );
        let envelope = ResponseEnvelope::of(shape, response)?;
        let list = match shape {
            ResponseShape::Rows => read_in_order(response, &envelope.list, inputs, |_, _| Ok(None), first)?,
            ResponseShape::Data => read_in_order(
                response,
                &envelope.list,
                inputs,
                |element, at| index_at(response, element, at),
                first,
            )?,
            ResponseShape::Ranks => read_ranked(response, &envelope.list, "score", inputs, first)?,
            ResponseShape::Results => {
                read_ranked(response, &envelope.list, "relevance_score", inputs, first)?
            }
        };
        let (opened, closes) = (envelope.list.start + 1, envelope.list.end - 1);
        let mut totals = envelope.totals;
        for total in &mut totals {
            if total.span.start < closes {
                return Err(invalid("its usage precedes its list"));
            }
            total.span = total.span.start - closes..total.span.end - closes;
        }
        Ok(PartialResponse {
            before: response[..opened].to_vec(),
            after: response[closes..].to_vec(),
            totals,
            list,
        })
    }

    /// Returns the memory that it takes in bytes.
    pub fn bytes(&self) -> usize {
        let list = match &self.list {
            ResponseList::InOrder(elements) => elements.len(),
            ResponseList::Ranked(ranks) => {
                ranks.iter().map(|rank| rank.element.len() + std::mem::size_of::<ResponseRank>()).sum()
            }
        };
        self.before.len() + self.after.len() + list
    }
}

/// Position of the list, and the numbers that the join replaces.
struct ResponseEnvelope {
    list: ByteSpan,
    totals: Vec<UsageTotal>,
}

impl ResponseEnvelope {
    fn of(shape: ResponseShape, response: &[u8]) -> Result<ResponseEnvelope, InvalidResponse> {
        let whole = json::whole(response).ok_or(invalid("it is not JSON"))?;
        let name = match shape {
            ResponseShape::Rows | ResponseShape::Ranks if response[whole.start] == b'[' => {
                return Ok(ResponseEnvelope { list: whole, totals: Vec::new() });
            }
            ResponseShape::Rows | ResponseShape::Ranks => return Err(invalid("it is not a list")),
            ResponseShape::Data => "data",
            ResponseShape::Results => "results",
        };
        let members = json::members(response, &whole, MEMBERS_MAX).ok_or(invalid("it is not an object"))?;
        let member = |name: &str| members.iter().find(|member| member.is(response, name));
        let list =
            member(name).filter(|member| member.value.kind == Kind::List).ok_or(invalid("it has no list"))?;
        let mut totals = Vec::new();
        if let Some(usage) = member("usage") {
            let usage = json::members(response, &usage.value.span, MEMBERS_MAX)
                .ok_or(invalid("its usage is not an object"))?;
            for member in usage {
                if let Some(value) = number(response, &member.value.span) {
                    let kind = TotalKind::Usage { name: member.key(response).to_vec(), value };
                    totals.push(UsageTotal { span: member.value.span, kind });
                }
            }
        }
        if let Some(span) = member("meta").and_then(|meta| search_units(response, &meta.value.span)) {
            totals.push(UsageTotal { span, kind: TotalKind::SearchUnits });
        }
        totals.sort_by_key(|total| total.span.start);
        Ok(ResponseEnvelope { list: list.value.span.clone(), totals })
    }
}

fn search_units(response: &[u8], meta: &ByteSpan) -> Option<ByteSpan> {
    let inside = |span: &ByteSpan, name: &str| {
        let members = json::members(response, span, MEMBERS_MAX)?;
        members.into_iter().find(|member| member.is(response, name)).map(|member| member.value.span)
    };
    inside(&inside(meta, "billed_units")?, "search_units")
}

fn number<T: std::str::FromStr>(response: &[u8], span: &ByteSpan) -> Option<T> {
    std::str::from_utf8(&response[span.clone()]).ok()?.parse().ok()
}

/// Returns the elements of a list that has one for each input, in order. `index_of` returns the position of an
/// element's index.
fn read_in_order(
    response: &[u8],
    list: &ByteSpan,
    inputs: usize,
    index_of: impl Fn(&Value, usize) -> Result<Option<ByteSpan>, InvalidResponse>,
    first: usize,
) -> Result<ResponseList, InvalidResponse> {
    let (mut elements, mut count) = (Vec::with_capacity(list.len() + inputs * 4), 0);
    let mut error = None;
    json::elements(response, list, |element| {
        if count > 0 {
            elements.push(b',');
        }
        match index_of(&element, count) {
            Ok(index) => push_with_index(response, &element, index, first + count, &mut elements),
            Err(reason) => error = Some(reason),
        }
        count += 1;
    })
    .ok_or(invalid("its list is not JSON"))?;
    match error {
        Some(reason) => Err(reason),
        None if count != inputs => Err(invalid("it does not have one element for each input")),
        None => Ok(ResponseList::InOrder(elements)),
    }
}

/// Returns the position of an element's index, which must be `at`.
fn index_at(response: &[u8], element: &Value, at: usize) -> Result<Option<ByteSpan>, InvalidResponse> {
    let index = index(response, element)?;
    if number(response, &index) == Some(at) {
        Ok(Some(index))
    } else {
        Err(invalid("its elements are out of order"))
    }
}

fn index(response: &[u8], element: &Value) -> Result<ByteSpan, InvalidResponse> {
    let members =
        json::members(response, &element.span, MEMBERS_MAX).ok_or(invalid("an element is not an object"))?;
    let index = members.into_iter().find(|member| member.is(response, "index"));
    index.map(|index| index.value.span).ok_or(invalid("an element has no index"))
}

/// Writes an element with another index, if it has one.
fn push_with_index(
    response: &[u8],
    element: &Value,
    index: Option<ByteSpan>,
    new_index: usize,
    out: &mut Vec<u8>,
) {
    let ByteSpan { start, end } = element.span;
    match index {
        None => out.extend_from_slice(&response[start..end]),
        Some(index) => {
            out.extend_from_slice(&response[start..index.start]);
            out.extend_from_slice(new_index.to_string().as_bytes());
            out.extend_from_slice(&response[index.end..end]);
        }
    }
}

/// Returns the elements of a list of ranks: each of another input, best first.
fn read_ranked(
    response: &[u8],
    list: &ByteSpan,
    score: &str,
    inputs: usize,
    first: usize,
) -> Result<ResponseList, InvalidResponse> {
    let mut ranks: Vec<ResponseRank> = Vec::new();
    let mut is_ranked = vec![false; inputs];
    let mut read = |element: Value| {
        let position = index(response, &element)?;
        let at = number::<usize>(response, &position).filter(|at| *at < inputs);
        let at = at.ok_or(invalid("it ranks a document that was not sent"))?;
        if std::mem::replace(&mut is_ranked[at], true) {
            return Err(invalid("it ranks a document twice"));
        }
        let members = json::members(response, &element.span, MEMBERS_MAX).unwrap_or_default();
        let score = members.iter().find(|member| member.is(response, score));
        let score = score.and_then(|score| number::<f64>(response, &score.value.span));
        let score = score.ok_or(invalid("an element has no score"))?;
        let mut bytes = Vec::with_capacity(element.span.len() + 6);
        push_with_index(response, &element, Some(position), first + at, &mut bytes);
        ranks.push(ResponseRank { score, index: first + at, element: bytes });
        Ok(())
    };
    let mut error = Ok(());
    json::elements(response, list, |element| {
        if error.is_ok() {
            error = read(element);
        }
    })
    .ok_or(invalid("its list is not JSON"))?;
    error?;
    Ok(ResponseList::Ranked(ranks))
}

/// Join of the responses in order.
#[derive(Debug)]
pub struct ResponseJoiner {
    inputs: usize,
    top_n: Option<u64>,
    parts: usize,
    /// Bytes after the list, of the first response.
    after: Vec<u8>,
    totals: Vec<UsageTotal>,
    sums: BTreeMap<Vec<u8>, u64>,
    ranks: Vec<std::vec::IntoIter<ResponseRank>>,
}

impl ResponseJoiner {
    /// Starts a join for a request with this number of inputs; `top_n` limits ranked documents.
    pub fn new(inputs: usize, top_n: Option<u64>) -> ResponseJoiner {
        ResponseJoiner {
            inputs,
            top_n,
            parts: 0,
            after: Vec::new(),
            totals: Vec::new(),
            sums: BTreeMap::new(),
            ranks: Vec::new(),
        }
    }

    /// Adds the next response in the order of the inputs, and appends the bytes that are now known to `out`.
    pub fn push(&mut self, part: PartialResponse, out: &mut Vec<Vec<u8>>) {
        let PartialResponse { before, after, totals, list } = part;
        for total in &totals {
            if let TotalKind::Usage { name, value } = &total.kind {
                let sum = self.sums.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*value);
            }
        }
        let first = self.parts == 0;
        self.parts += 1;
        if first {
            (self.after, self.totals) = (after, totals);
            out.push(before);
        }
        match list {
            ResponseList::InOrder(elements) => {
                if !first {
                    out.push(b",".to_vec());
                }
                out.push(elements);
            }
            ResponseList::Ranked(ranks) => self.ranks.push(ranks.into_iter()),
        }
    }

    /// Ends the join after all responses, and appends the rest to `out`.
    pub fn finish(mut self, out: &mut Vec<Vec<u8>>) {
        let ranks = self.merge_ranks();
        if !ranks.is_empty() {
            out.push(ranks);
        }
        let (mut rest, mut at) = (Vec::with_capacity(self.after.len() + 16), 0);
        for UsageTotal { span, kind } in &self.totals {
            let total = match kind {
                TotalKind::Usage { name, value: _ } => self.sums.get(name).copied().unwrap_or(0),
                // The sum over sub-requests would round each one up.
                TotalKind::SearchUnits => self.inputs.div_ceil(DOCUMENTS_PER_SEARCH_UNIT) as u64,
            };
            rest.extend_from_slice(&self.after[at..span.start]);
            rest.extend_from_slice(total.to_string().as_bytes());
            at = span.end;
        }
        rest.extend_from_slice(&self.after[at..]);
        out.push(rest);
    }

    /// Merges all ranks, best first, ties by index. Within a response they stay in the order of the replica, which
    /// knows more digits than it returns.
    fn merge_ranks(&mut self) -> Vec<u8> {
        let limit = self.top_n.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        let mut merged = Vec::new();
        for _ in 0..limit {
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

fn better(a: &ResponseRank, b: &ResponseRank) -> Ordering {
    b.score.total_cmp(&a.score).then(a.index.cmp(&b.index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    /// Joins the responses to sub-requests with these numbers of inputs.
    fn join(
        shape: ResponseShape,
        responses: &[(usize, String)],
        top_n: Option<u64>,
    ) -> Result<String, &'static str> {
        let inputs = responses.iter().map(|(inputs, _)| inputs).sum();
        let (mut join, mut out, mut first) = (ResponseJoiner::new(inputs, top_n), Vec::new(), 0);
        for (inputs, response) in responses {
            let part = PartialResponse::read(shape, response.as_bytes(), *inputs, first)
                .map_err(|invalid| invalid.reason)?;
            assert!(part.bytes() >= response.len() / 2, "the memory is counted");
            join.push(part, &mut out);
            first += inputs;
        }
        join.finish(&mut out);
        Ok(String::from_utf8(out.concat()).expect("UTF-8 stays UTF-8"))
    }

    fn check(shape: ResponseShape, responses: &[(usize, &str)], top_n: Option<u64>, expected: &str) {
        let responses: Vec<_> =
            responses.iter().map(|(inputs, response)| (*inputs, (*response).to_owned())).collect();
        assert_eq!(join(shape, &responses, top_n).as_deref(), Ok(expected));
        serde_json::from_str::<Json>(expected).expect("the expected response is JSON");
    }

    #[test]
    fn vectors_are_joined_in_order_with_their_indices_and_the_sum_of_usage() {
        check(
            ResponseShape::Data,
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
    fn bare_lists_are_concatenated() {
        check(ResponseShape::Rows, &[(2, "[[1.0], [2.50]]"), (1, " [[3]]\n")], None, "[[1.0],[2.50],[3]]");
        check(ResponseShape::Rows, &[(1, "[0.5]"), (2, "[1e-9,-1]")], None, "[0.5,1e-9,-1]");
        let yes = r#"[{"score":0.75,"label":"yes, [index]"}]"#;
        check(
            ResponseShape::Rows,
            &[(1, &format!("[{yes}]")), (1, &format!("[{yes}]"))],
            None,
            &format!("[{yes},{yes}]"),
        );
    }

    #[test]
    fn ranks_are_merged_best_first() {
        let responses = [
            (2, r#"[{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.5,"text":"a"}]"#),
            (2, r#"[{"index":0,"score":0.95,"text":"c"},{"index":1,"score":0.5,"text":"d"}]"#),
        ];
        check(
            ResponseShape::Ranks,
            &responses,
            None,
            r#"[{"index":2,"score":0.95,"text":"c"},{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.5,"text":"a"},{"index":3,"score":0.5,"text":"d"}]"#,
        );
    }

    #[test]
    fn the_best_results_are_returned_and_searches_are_counted_once() {
        let response = |results: &str, tokens: u64| {
            format!(
                r#"{{"id":"r","model":"m","results":[{results}],"meta":{{"api_version":{{"version":"2"}},"billed_units":{{"search_units":1}}}},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}"#
            )
        };
        let documents = [
            r#"{"index":0,"relevance_score":0.2,"document":{"index":7,"text":"a"}}"#,
            r#"{"index":49,"relevance_score":1e-2,"document":{"text":"z"}}"#,
            r#"{"index":3,"relevance_score":0.30,"document":{"relevance_score":9}}"#,
        ];
        let first = response(&[documents[0], documents[1]].join(","), 10);
        let expected = response(
            r#"{"index":53,"relevance_score":0.30,"document":{"relevance_score":9}},{"index":0,"relevance_score":0.2,"document":{"index":7,"text":"a"}}"#,
            17,
        );
        check(ResponseShape::Results, &[(50, &first), (50, &response(documents[2], 7))], Some(2), &expected);
        let more =
            join(ResponseShape::Results, &[(50, first), (51, response("", 7))], None).expect("a response");
        assert!(more.contains(r#""search_units":2"#) && more.contains(r#""index":49"#), "{more}");
    }

    #[test]
    fn an_invalid_response_is_not_joined() {
        for (shape, inputs, response, reason) in [
            (ResponseShape::Rows, 1, "", "it is not JSON"),
            (ResponseShape::Rows, 1, "[[1]", "it is not JSON"),
            (ResponseShape::Rows, 1, "{}", "it is not a list"),
            (ResponseShape::Rows, 2, "[[1]]", "it does not have one element for each input"),
            (ResponseShape::Rows, 1, "[[1],[2]]", "it does not have one element for each input"),
            (ResponseShape::Rows, 2, "[[1] [2]]", "its list is not JSON"),
            (ResponseShape::Data, 1, "[]", "it is not an object"),
            (ResponseShape::Data, 1, r#"{"results":[]}"#, "it has no list"),
            (ResponseShape::Data, 1, r#"{"data":{}}"#, "it has no list"),
            (ResponseShape::Data, 1, r#"{"data":[[1]]}"#, "an element is not an object"),
            (ResponseShape::Data, 1, r#"{"data":[{}]}"#, "an element has no index"),
            (ResponseShape::Data, 1, r#"{"data":[{"index":1}]}"#, "its elements are out of order"),
            (
                ResponseShape::Data,
                2,
                r#"{"data":[{"index":0}]}"#,
                "it does not have one element for each input",
            ),
            (ResponseShape::Data, 1, r#"{"data":[{"index":0}],"usage":3}"#, "its usage is not an object"),
            (
                ResponseShape::Data,
                1,
                r#"{"usage":{"a":1},"data":[{"index":0}]}"#,
                "its usage precedes its list",
            ),
            (ResponseShape::Ranks, 2, r#"[{"index":2,"score":1}]"#, "it ranks a document that was not sent"),
            (
                ResponseShape::Ranks,
                2,
                r#"[{"index":0,"score":1},{"index":0,"score":1}]"#,
                "it ranks a document twice",
            ),
            (ResponseShape::Ranks, 1, r#"[{"index":0}]"#, "an element has no score"),
            (ResponseShape::Results, 1, r#"{"results":[{"index":0,"score":1}]}"#, "an element has no score"),
        ] {
            assert_eq!(join(shape, &[(inputs, response.to_owned())], None), Err(reason), "{response}");
        }
    }

    proptest! {
        /// Invariant 3, Order and identity: the joined response equals that of an unsplit request.
        #[test]
        fn rows_of_sub_requests_join_to_the_whole(
            sub_requests in prop::collection::vec(prop::collection::vec(any::<i32>(), 1..6), 1..6),
            strings: bool,
        ) {
            let row = |index: usize, value: &i32| {
                let embedding = if strings { json!(format!("{value}]\"[")) } else { json!([value, 0.5]) };
                json!({"object": "embedding", "index": index, "embedding": embedding})
            };
            let response = |rows: &[i32]| {
                let data: Vec<_> = rows.iter().enumerate().map(|(index, value)| row(index, value)).collect();
                json!({"data": data, "usage": {"total_tokens": rows.len() * 3, "cached": null}, "x": {"total_tokens": 1}})
            };
            let responses: Vec<_> = sub_requests.iter().map(|rows| (rows.len(), response(rows).to_string())).collect();
            let joined: Json = serde_json::from_str(&join(ResponseShape::Data, &responses, None).unwrap()).unwrap();
            prop_assert_eq!(joined, response(&sub_requests.concat()));
            let rows = |rows: &[i32]| json!(rows.iter().map(|value| json!([value])).collect::<Vec<_>>());
            let responses: Vec<_> = sub_requests.iter().map(|sub_request| (sub_request.len(), rows(sub_request).to_string())).collect();
            let joined: Json = serde_json::from_str(&join(ResponseShape::Rows, &responses, None).unwrap()).unwrap();
            prop_assert_eq!(joined, rows(&sub_requests.concat()));
        }

        /// Ranks of sub-requests, each truncated to its best, merge to the best of all.
        #[test]
        fn ranks_of_sub_requests_join_to_the_ranks_of_all(
            sub_requests in prop::collection::vec(prop::collection::vec(0u8..20, 1..6), 1..6),
            top_n in prop::option::of(1usize..12),
        ) {
            let ranks = |scores: &[u8]| {
                let mut order: Vec<usize> = (0..scores.len()).collect();
                order.sort_by_key(|index| (std::cmp::Reverse(scores[*index]), *index));
                order.truncate(top_n.unwrap_or(usize::MAX));
                let rank = |index: usize| json!({"index": index, "score": f64::from(scores[index]) / 16.0});
                json!(order.into_iter().map(rank).collect::<Vec<_>>())
            };
            let responses: Vec<_> = sub_requests.iter().map(|scores| (scores.len(), ranks(scores).to_string())).collect();
            let joined = join(ResponseShape::Ranks, &responses, top_n.map(|limit| limit as u64)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Json>(&joined).unwrap(), ranks(&sub_requests.concat()));
        }
    }
}
