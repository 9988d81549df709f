//! Split of a body into the bodies of sub-requests.
//!
//! Each API has its inputs in a list of its own ([`ApiOperation::split`]). [`SplittableBody::read`] finds the list and the positions
//! of its elements; [`SplittableBody::sub_requests`] divides them into runs of about equal work;
//! [`SplittableBody::body`] is the original with the list shortened to one run and every other byte unchanged. So all
//! other fields (a query, a prompt's name, unknown fields) are in every sub-request and have the same meaning there.
//!
//! A body is not split if a split could change the response: when the list is present twice, when a list of texts
//! contains a list of token ids (unsplit it is rejected, split it might not be), when an apparent list of inputs is one
//! input (token ids, a pair), or when it is not the expected JSON. The replica then reports the error.

use super::INPUTS_MAX;
use super::json::{self, ByteSpan, JsonMember, Kind, MEMBERS_MAX};
use crate::body::BYTES_PER_TOKEN;
use replica_api::api::{ApiOperation, ElementKinds, InputList, ResponseShape};
use std::ops::Range;

/// Maximum inputs of one sub-request. A quarter of what a replica accepts: so that a response can be buffered until it
/// is complete (27 MB for vectors of 4,096 numbers as text), and so that little is computed again when a region is
/// lost.
pub const SUB_REQUEST_INPUTS_MAX: usize = 512;
/// Maximum estimated tokens of one sub-request. A replica accepts 2^20; text that is worst for a tokenizer has one for
/// every byte, which is four times the estimate and half of that.
pub const SUB_REQUEST_TOKENS_MAX: u64 = 1 << 17;
/// Maximum bytes of the inputs of one sub-request: at four bytes a token as many as [`SUB_REQUEST_TOKENS_MAX`] allows,
/// and as much again for token ids as text.
pub const SUB_REQUEST_BYTES_MAX: usize = 1 << 20;
/// Maximum bytes of a body without its inputs, which are sent with every sub-request. Cohere's query has some thousand.
pub const REST_BYTES_MAX: usize = 64 << 10;
/// Special tokens that a model adds to each input, which matter where inputs are short.
pub const SPECIAL_TOKENS: u64 = 2;

/// Position and size of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InputElement {
    start: usize,
    end: usize,
    tokens: u64,
}

/// Positions at which a body can be split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplittableBody {
    /// Structure of the response.
    pub shape: ResponseShape,
    /// The list's name, as in errors of a replica.
    pub field: &'static str,
    /// Number of ranked documents to return; absent = all.
    pub top_n: Option<u64>,
    list: ByteSpan,
    elements: Vec<InputElement>,
}

/// Consecutive inputs of a body that form one sub-request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubRequest {
    /// Indices of the inputs, from 0.
    pub inputs: Range<usize>,
    /// Estimated tokens.
    pub tokens: u64,
}

/// The list has more elements than [`INPUTS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyInputs {
    /// Name of the list.
    pub field: &'static str,
    /// Number of elements.
    pub given: usize,
}

impl SplittableBody {
    /// Returns how the body of a request for `path` can be split; `None` if it should not be.
    pub fn read(path: &str, body: &[u8]) -> Result<Option<SplittableBody>, TooManyInputs> {
        let Some((list, span, top_n)) = find(path, body) else { return Ok(None) };
        let field = list.name();
        let (mut elements, mut given, mut fits) = (Vec::new(), 0, true);
        let mut first = None;
        let read = json::elements(body, &span, |value| {
            given += 1;
            let first = *first.get_or_insert(value.kind);
            fits &= match list.elements {
                ElementKinds::Texts => value.kind == Kind::Text,
                ElementKinds::Lists => value.kind == Kind::List,
                ElementKinds::TextsOrLists => {
                    matches!(value.kind, Kind::Text | Kind::List) && value.kind == first
                }
                ElementKinds::Documents => matches!(value.kind, Kind::Text | Kind::Object),
                ElementKinds::DocumentsOrLists => {
                    (value.kind == Kind::List) == (first == Kind::List)
                        && matches!(value.kind, Kind::Text | Kind::Object | Kind::List)
                }
            };
            if given <= INPUTS_MAX {
                let tokens = value.text_bytes as u64 / BYTES_PER_TOKEN + value.bare as u64 + SPECIAL_TOKENS;
                elements.push(InputElement { start: value.span.start, end: value.span.end, tokens });
            }
        });
        if read.is_none() || !fits || elements.len() < 2 {
            return Ok(None);
        }
        if given > INPUTS_MAX {
            return Err(TooManyInputs { field, given });
        }
        let inside = elements[elements.len() - 1].end - elements[0].start;
        if body.len() - inside > REST_BYTES_MAX {
            return Ok(None);
        }
        Ok(Some(SplittableBody { shape: list.shape, field, top_n, list: span, elements }))
    }

    /// Returns the number of inputs.
    pub fn inputs(&self) -> usize {
        self.elements.len()
    }

    /// Returns the estimated tokens of all inputs.
    pub fn tokens(&self) -> u64 {
        self.elements.iter().map(|element| element.tokens).sum()
    }

    /// Divides the inputs in order into sub-requests of about `tokens` each, of equal size, and none above the limits.
    /// An input that is above them by itself is a sub-request by itself.
    pub fn sub_requests(&self, tokens: u64) -> Vec<SubRequest> {
        let all = self.tokens();
        let count = all.div_ceil(tokens.clamp(1, SUB_REQUEST_TOKENS_MAX)).max(1);
        let mut sub_requests: Vec<SubRequest> = Vec::new();
        let (mut begun, mut before, mut tokens_in_sub_request) = (0, 0, 0);
        for (at, element) in self.elements.iter().enumerate() {
            // End of the current equal share, computed from the start so that rounding errors do not add up.
            let share_ends = (sub_requests.len() as u64 + 1) * all / count;
            let bytes = element.end - self.elements[begun].start;
            let full = at - begun == SUB_REQUEST_INPUTS_MAX
                || bytes > SUB_REQUEST_BYTES_MAX
                || tokens_in_sub_request + element.tokens > SUB_REQUEST_TOKENS_MAX
                || before + element.tokens / 2 >= share_ends;
            if full && at > begun {
                sub_requests.push(SubRequest { inputs: begun..at, tokens: tokens_in_sub_request });
                (begun, tokens_in_sub_request) = (at, 0);
            }
            before += element.tokens;
            tokens_in_sub_request += element.tokens;
        }
        sub_requests.push(SubRequest { inputs: begun..self.elements.len(), tokens: tokens_in_sub_request });
        sub_requests
    }

    /// Returns the body of a sub-request; `body` is the one that was read.
    pub fn body(&self, body: &[u8], sub_request: &SubRequest) -> Vec<u8> {
        self.parts(sub_request).map(|part| &body[part.start..part.end.min(body.len())]).concat()
    }

    /// Returns the length of [`SplittableBody::body`] for a body of `whole` bytes.
    pub fn body_bytes(&self, whole: usize, sub_request: &SubRequest) -> usize {
        self.parts(sub_request).map(|part| part.end.min(whole) - part.start).iter().sum()
    }

    /// Returns the ranges that form a sub-request: up to the list, the inputs, and from the end of the list to that of
    /// the body.
    fn parts(&self, sub_request: &SubRequest) -> [ByteSpan; 3] {
        let Range { start, end } = sub_request.inputs;
        let inside = self.elements[start].start..self.elements[end - 1].end;
        [0..self.list.start + 1, inside, self.list.end - 1..usize::MAX]
    }
}

/// Finds the list of inputs of a body, and the number of ranked documents to return.
fn find(path: &str, body: &[u8]) -> Option<(&'static InputList, ByteSpan, Option<u64>)> {
    let members = json::object(body, MEMBERS_MAX)?;
    let lists = ApiOperation::at(path)?.split;
    let mut there = lists.iter().filter_map(|list| Some((list, only(&members, body, list.field.0)?)));
    let (list, mut value) = there.next()?;
    // The list depends on the model behind the root, which is not known here.
    if path == "/" && there.next().is_some() {
        return None;
    }
    let inner;
    if let Some(name) = list.field.1 {
        inner = json::members(body, &value.value.span, MEMBERS_MAX)?;
        value = only(&inner, body, name)?;
    }
    // Several first texts are paired with as many second ones.
    if list.field.0 == "text_2" && only(&members, body, "text_1")?.value.kind != Kind::Text {
        return None;
    }
    if value.value.kind != Kind::List {
        return None;
    }
    let top_n = only(&members, body, "top_n")
        .and_then(|value| std::str::from_utf8(&body[value.value.span.clone()]).ok()?.parse().ok());
    Some((list, value.value.span.clone(), top_n))
}

/// Returns the member of this name if there is exactly one and it is not `null`.
fn only<'a>(members: &'a [JsonMember], body: &[u8], name: &str) -> Option<&'a JsonMember> {
    let mut named = members.iter().filter(|member| member.is(body, name));
    let member = named.next()?;
    (named.next().is_none() && &body[member.value.span.clone()] != b"null").then_some(member)
}

/// Rewrites a replica's error about a sub-request for the whole request: the index of the invalid element is increased
/// by `first`, the index of the sub-request's first input.
pub fn rebase_input_index(refusal: &[u8], field: &str, first: usize) -> Vec<u8> {
    let named = format!("`{field}[");
    let Some(at) = memchr::memmem::find(refusal, named.as_bytes()) else { return refusal.to_vec() };
    let (before, rest) = refusal.split_at(at + named.len());
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let index = std::str::from_utf8(&rest[..digits]).ok().and_then(|digits| digits.parse::<usize>().ok());
    match index.and_then(|index| index.checked_add(first)) {
        Some(index) => [before, index.to_string().as_bytes(), &rest[digits..]].concat(),
        None => refusal.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn splittable(path: &str, body: &str) -> Option<SplittableBody> {
        SplittableBody::read(path, body.as_bytes()).unwrap()
    }

    /// Returns the parsed bodies of all sub-requests of this size.
    fn sub_requests(path: &str, body: &str, tokens: u64) -> Vec<Value> {
        let splittable = splittable(path, body).unwrap_or_else(|| panic!("{path} {body} can be split"));
        let bodies = splittable
            .sub_requests(tokens)
            .into_iter()
            .map(|sub_request| splittable.body(body.as_bytes(), &sub_request));
        bodies.map(|body| serde_json::from_slice(&body).expect("a sub-request is JSON")).collect()
    }

    #[test]
    fn every_api_is_split_at_its_inputs() {
        let check = |path: &str, body: &str, pointer: &str, shape: ResponseShape, field: &str| {
            let found = splittable(path, body).unwrap_or_else(|| panic!("{path} {body} can be split"));
            assert_eq!((found.shape, found.field, found.inputs()), (shape, field, 2), "{path} {body}");
            let whole: Value = serde_json::from_str(body).unwrap();
            for (at, sub_request) in sub_requests(path, body, 1).into_iter().enumerate() {
                let mut expected = whole.clone();
                let list = expected.pointer_mut(pointer).unwrap();
                *list = json!([list[at]]);
                assert_eq!(sub_request, expected, "{path}");
            }
        };
        let (data, rows) = (ResponseShape::Data, ResponseShape::Rows);
        check("/v1/embeddings", r#"{"model":"m","input":["a","b"],"user":"u"}"#, "/input", data, "input");
        check("/v1/embeddings", r#"{ "in\u0070ut" : [ [1, 2] , [3] ] }"#, "/input", data, "input");
        let mixed = r#"{"input":[{"text":"a"},"b"]}"#;
        check("/v1/embeddings", mixed, "/input", data, "input");
        check("/infinity/embeddings", mixed, "/input", data, "input");
        check("/voyage/v1/embeddings", r#"{"input":["a","b"]}"#, "/input", data, "input");
        check("/classify", r#"{"input":["a","b"]}"#, "/input", data, "input");
        check("/score", r#"{"text_1":"q","text_2":["a","b"]}"#, "/text_2", data, "text_2");
        let documents = r#"{"query":"q","documents":["a",{"text":"b","documents":["c"]}],"top_n":1}"#;
        check("/v2/rerank", documents, "/documents", ResponseShape::Results, "documents");
        check("/rerank", documents, "/documents", ResponseShape::Results, "documents");
        check(
            "/rerank",
            r#"{"texts":["a","b"],"documents":["c","d"]}"#,
            "/texts",
            ResponseShape::Ranks,
            "texts",
        );
        check(
            "/rerank",
            r#"{"texts":null,"documents":["c","d"]}"#,
            "/documents",
            ResponseShape::Results,
            "documents",
        );
        check("/embed", r#"{"inputs":["a","b"],"truncate":true}"#, "/inputs", rows, "inputs");
        check("/predict", r#"{"inputs":[["a"],["b","c"]]}"#, "/inputs", rows, "inputs");
        check("/tokenize", r#"{"inputs":["a","b"]}"#, "/inputs", rows, "inputs");
        check("/decode", r#"{"ids":[[1],[2]]}"#, "/ids", rows, "ids");
        let sentences = r#"{"inputs":{"source_sentence":"a","sentences":["b","c"]},"sentences":["d"]}"#;
        check("/similarity", sentences, "/inputs/sentences", rows, "inputs.sentences");
        check("/", r#"{"inputs":["a","b"]}"#, "/inputs", rows, "inputs");
        check("/", r#"{"texts":["a","b"],"query":"q"}"#, "/texts", ResponseShape::Ranks, "texts");
        assert_eq!(splittable("/rerank", documents).unwrap().top_n, Some(1));
    }

    #[test]
    fn a_body_is_not_split_if_a_split_could_change_the_response() {
        for (path, body) in [
            ("/v1/embeddings", r#"{"input":"a"}"#),
            ("/v1/embeddings", r#"{"input":["a"]}"#),
            ("/v1/embeddings", r#"{"input":[1,2,3]}"#),
            ("/v1/embeddings", r#"{"input":["a",[1]]}"#),
            ("/v1/embeddings", r#"{"input":["a",null]}"#),
            ("/v1/embeddings", r#"{"input":[[1],{"text":"a"}]}"#),
            ("/voyage/v1/embeddings", r#"{"input":["a",[1]]}"#),
            ("/v2/embed", r#"{"texts":["a","b"]}"#),
            ("/voyage/v1/rerank", r#"{"documents":["a","b"]}"#),
            ("/pooling", r#"{"input":["a","b"]}"#),
            ("/v1/embeddings", r#"{"input":["a","b"],"input":["c","d"]}"#),
            ("/v1/embeddings", r#"{"input":["a","b"],"in\u0070ut":["c","d"]}"#),
            ("/v1/embeddings", r#"{"input":["a" "b"]}"#),
            ("/v1/embeddings", r#"{"input":["a","b",]}"#),
            ("/v1/embeddings", r#"{"input":["a","b"]"#),
            ("/v1/embeddings", r#"{"input":["a","b"]} x"#),
            ("/v1/embeddings", r#"[["a","b"]]"#),
            ("/v1/embeddings", r#"{"inputs":["a","b"]}"#),
            ("/predict", r#"{"inputs":["a","b"]}"#),
            ("/score", r#"{"text_1":["a","b"],"text_2":["a","b"]}"#),
            ("/score", r#"{"text_2":["a","b"]}"#),
            ("/", r#"{"inputs":["a","b"],"texts":["a","b"]}"#),
            ("/embed_all", r#"{"inputs":["a","b"]}"#),
            ("/info", r#"{"inputs":["a","b"]}"#),
        ] {
            assert_eq!(splittable(path, body), None, "{path} {body}");
        }
        let rest = |bytes: usize| format!(r#"{{"input":["a","b"],"user":"{}"}}"#, "x".repeat(bytes - 22));
        assert!(splittable("/v1/embeddings", &rest(REST_BYTES_MAX)).is_some());
        assert!(splittable("/v1/embeddings", &rest(REST_BYTES_MAX + 1)).is_none());
    }

    #[test]
    fn the_limit_of_inputs_holds_at_it_and_one_past_it() {
        let read = |inputs: usize| {
            SplittableBody::read("/v1/embeddings", json!({"input": vec!["x"; inputs]}).to_string().as_bytes())
        };
        assert_eq!(read(INPUTS_MAX).unwrap().unwrap().inputs(), INPUTS_MAX);
        assert_eq!(read(INPUTS_MAX + 1), Err(TooManyInputs { field: "input", given: INPUTS_MAX + 1 }));
    }

    #[test]
    fn a_sub_request_is_within_its_limits_at_them_and_one_past_them() {
        let check = |element: String, inputs: usize, tokens: u64, expected: &[usize]| {
            let body = format!(r#"{{"input":[{}]}}"#, vec![element; inputs].join(","));
            let splittable = splittable("/v1/embeddings", &body).unwrap();
            let sizes: Vec<usize> =
                splittable.sub_requests(tokens).iter().map(|sub_request| sub_request.inputs.len()).collect();
            assert_eq!(sizes, expected);
        };
        let short = || "\"x\"".to_owned();
        check(short(), SUB_REQUEST_INPUTS_MAX, u64::MAX, &[512]);
        check(short(), SUB_REQUEST_INPUTS_MAX + 1, u64::MAX, &[512, 1]);
        check(short(), 10, 10, &[5, 5]);
        check(short(), 10, 6, &[2, 3, 2, 3]);
        // Two inputs that have a sub-request's maximum of tokens together, and a byte more.
        let half = |tokens: u64| format!("\"{}\"", "x".repeat((tokens as usize - 2) * 4));
        check(half(SUB_REQUEST_TOKENS_MAX / 2), 4, u64::MAX, &[2, 2]);
        check(half(SUB_REQUEST_TOKENS_MAX / 2 + 1), 4, u64::MAX, &[1, 1, 1, 1]);
        check(half(SUB_REQUEST_TOKENS_MAX * 2), 2, u64::MAX, &[1, 1]);
        // Ids with many digits, and few tokens, are limited by their bytes.
        let ids = format!("[{}]", " ".repeat(SUB_REQUEST_BYTES_MAX / 2 - 3));
        check(ids.clone(), 4, u64::MAX, &[2, 2]);
        check(format!("{ids}  "), 4, u64::MAX, &[1, 1, 1, 1]);
    }

    #[test]
    fn an_error_about_a_sub_request_names_the_input_of_the_whole_request() {
        let check = |message: &str, expected: &str| {
            let refusal = |message: &str| json!({"error": {"message": message}}).to_string();
            let rebased = rebase_input_index(refusal(message).as_bytes(), "input", 1024);
            assert_eq!(String::from_utf8(rebased).unwrap(), refusal(expected));
        };
        check("`input[3]` is empty", "`input[1027]` is empty");
        check("`input[0][1]` is wrong; `input[2]`", "`input[1024][1]` is wrong; `input[2]`");
        check("`input` has 3 elements", "`input` has 3 elements");
        check("`inputs[3]` is empty", "`inputs[3]` is empty");
        check("`input[x]`", "`input[x]`");
        check("`input[99999999999999999999999]`", "`input[99999999999999999999999]`");
    }

    fn element() -> impl Strategy<Value = Value> {
        prop_oneof![
            ".{0,40}".prop_map(Value::from),
            prop::collection::btree_map("(text|documents|.*)", r#"[\[\]{}",\\a-z]{0,20}"#, 0..3)
                .prop_map(|object| json!(object)),
        ]
    }

    proptest! {
        /// Invariant 3, Order and identity: no input is lost, duplicated or changed, and everything else is unchanged.
        #[test]
        fn the_sub_requests_together_are_the_whole(
            documents in prop::collection::vec(element(), 2..40),
            mut rest in prop::collection::btree_map("(query|texts|input|[a-z]{0,8})", element(), 0..4),
            tokens in 1u64..60,
            pretty: bool,
        ) {
            rest.insert("documents".into(), documents.clone().into());
            let body = if pretty { serde_json::to_string_pretty(&rest) } else { serde_json::to_string(&rest) }.unwrap();
            let sub_requests = sub_requests("/v2/rerank", &body, tokens);
            let mut joined = Vec::new();
            for mut sub_request in sub_requests {
                let part = sub_request["documents"].as_array().unwrap().clone();
                prop_assert!(!part.is_empty());
                joined.extend(part);
                sub_request["documents"] = documents.clone().into();
                prop_assert_eq!(sub_request, json!(rest));
            }
            prop_assert_eq!(joined, documents);
        }

        /// Sub-requests are equal to within the largest input, so that none takes longer than the others.
        #[test]
        fn sub_requests_have_equal_work(lengths in prop::collection::vec(0usize..400, 2..300), tokens in 1u64..4000) {
            let inputs: Vec<String> = lengths.iter().map(|length| "x".repeat(*length)).collect();
            let body = json!({"input": inputs}).to_string();
            let splittable = splittable("/v1/embeddings", &body).unwrap();
            let sub_requests = splittable.sub_requests(tokens);
            let largest = splittable.elements.iter().map(|element| element.tokens).max().unwrap();
            prop_assert_eq!(sub_requests.iter().map(|sub_request| sub_request.tokens).sum::<u64>(), splittable.tokens());
            for sub_request in &sub_requests {
                prop_assert!(sub_request.tokens <= tokens + 2 * largest, "{} > {tokens} + 2 * {largest}", sub_request.tokens);
            }
        }

        #[test]
        fn no_body_makes_it_panic_or_split_invalid_json(
            bytes in prop::collection::vec(prop::sample::select(br#"[]{}",:\ 1a"#.to_vec()), 0..24),
            head in prop::sample::select(vec!["", "{\"documents\":[", "{\"documents\":[\"a\",\"b\"", "{\"top_n\":"]),
        ) {
            let body = [head.as_bytes(), &bytes].concat();
            if let Ok(Some(splittable)) = SplittableBody::read("/v1/rerank", &body) {
                let whole: Result<Value, _> = serde_json::from_slice(&body);
                let body_of = |sub_request: &SubRequest| {
                    let made = splittable.body(&body, sub_request);
                    assert_eq!(splittable.body_bytes(body.len(), sub_request), made.len());
                    made
                };
                let sub_requests: Vec<_> = splittable.sub_requests(1).iter().map(body_of).collect();
                let valid = sub_requests.iter().all(|sub_request| serde_json::from_slice::<Value>(sub_request).is_ok());
                prop_assert_eq!(whole.is_ok(), valid, "all sub-requests are JSON if and only if the whole is");
            }
        }
    }
}
