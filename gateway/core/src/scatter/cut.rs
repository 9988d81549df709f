//! From a body to the bodies of its pieces.
//!
//! Each API has its inputs in a list of its own ([`LISTS`]). [`Cutting::read`] finds it and where its elements stand;
//! [`Cutting::pieces`] divides them into runs of about equal work; [`Cutting::body`] is the original with the list
//! shortened to one run and every other byte as it came. So whatever else a body has (a query, a prompt's name, fields
//! that nobody knows) is in every piece, and a piece means of its inputs what the whole means of them.
//!
//! A body is left whole wherever a cut could change what is answered: when the list is there twice, when a list of texts
//! has a list of token ids in it (whole it is refused, cut it might not be), when what looks like a list of inputs is one
//! input (token ids, a pair), or when it is not the JSON that it should be. The replica then says what is wrong with it.

use super::json::{self, Kind, Member, Span};
use super::{INPUTS_MAX, Shape};
use std::ops::Range;

/// Inputs of one piece. A quarter of what a replica takes: so that a piece's answer can be held until it is whole (27 MB
/// for vectors of 4,096 numbers as text), and so that little is computed again when a region is lost.
pub const PIECE_INPUTS_MAX: usize = 512;
/// Tokens of one piece, by estimate. A replica takes 2^20; text that is worst for a tokenizer has one for every byte,
/// which is four times the estimate and half of that.
pub const PIECE_TOKENS_MAX: u64 = 1 << 17;
/// Bytes of the inputs of one piece: at four bytes a token as many as [`PIECE_TOKENS_MAX`] allows, and as much again for
/// token ids as text.
pub const PIECE_BYTES_MAX: usize = 1 << 20;
/// Bytes of a body beside its inputs, which go with every piece. Cohere's query has some thousand.
pub const REST_BYTES_MAX: usize = 64 << 10;
/// Members of a body; no API has half as many.
const MEMBERS_MAX: usize = 64;

/// Bytes of text a token, roughly, as [`crate::body`] has it.
const BYTES_PER_TOKEN: usize = 4;
/// Tokens that a model puts around each input, which count where inputs are short.
pub const TOKENS_AROUND: u64 = 2;

/// Which elements a list of inputs can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Elements {
    Texts,
    Lists,
    /// All of them texts, or all of them lists.
    TextsOrLists,
    /// All of them texts or objects, mixed as they come; or all of them lists.
    DocumentsOrLists,
    /// Texts and objects, mixed as they come.
    Documents,
}

/// Where an API has its inputs.
struct List {
    path: &'static str,
    /// The member; of an object in the body, both names.
    field: (&'static str, Option<&'static str>),
    elements: Elements,
    shape: Shape,
}

const fn list(
    path: &'static str,
    field: (&'static str, Option<&'static str>),
    elements: Elements,
    shape: Shape,
) -> List {
    List { path, field, elements, shape }
}

/// Every path whose requests can be cut. `/embed_all` and `/pooling` are not among them: a row per token is more than can be
/// held. Neither are Cohere's `/v1/embed` and `/v2/embed` and Voyage's rerank, whose answers have several lists or ranks of
/// another form: there a request has what one replica takes, ten times what their own clients send. Of
/// two lists at one path the first that is there counts, as the replica reads it.
const LISTS: [List; 20] = [
    list("/v1/embeddings", ("input", None), Elements::DocumentsOrLists, Shape::Data),
    list("/infinity/embeddings", ("input", None), Elements::DocumentsOrLists, Shape::Data),
    list("/voyage/v1/embeddings", ("input", None), Elements::Texts, Shape::Data),
    list("/infinity/rerank", ("documents", None), Elements::Documents, Shape::Results),
    list("/classify", ("input", None), Elements::Texts, Shape::Data),
    list("/v1/classify", ("input", None), Elements::Texts, Shape::Data),
    list("/score", ("text_2", None), Elements::Texts, Shape::Data),
    list("/v1/score", ("text_2", None), Elements::Texts, Shape::Data),
    list("/v1/rerank", ("documents", None), Elements::Documents, Shape::Results),
    list("/v2/rerank", ("documents", None), Elements::Documents, Shape::Results),
    list("/rerank", ("texts", None), Elements::Texts, Shape::Ranks),
    list("/rerank", ("documents", None), Elements::Documents, Shape::Results),
    list("/embed", ("inputs", None), Elements::TextsOrLists, Shape::Rows),
    list("/predict", ("inputs", None), Elements::Lists, Shape::Rows),
    list("/tokenize", ("inputs", None), Elements::Texts, Shape::Rows),
    list("/decode", ("ids", None), Elements::Lists, Shape::Rows),
    list("/similarity", ("inputs", Some("sentences")), Elements::Texts, Shape::Rows),
    // The root of a deployment is `/embed`, `/predict` or `/rerank`, whatever its model is for. Texts are inputs of the
    // first only; for the second they are one pair, and three of them an error, whole and in pieces.
    list(ROOT, ("inputs", None), Elements::TextsOrLists, Shape::Rows),
    list(ROOT, ("texts", None), Elements::Texts, Shape::Ranks),
    list(ROOT, ("documents", None), Elements::Documents, Shape::Results),
];

const ROOT: &str = "/";

/// The lists of a path's body that can be cut, by their members.
pub fn fields(path: &str) -> Vec<&'static str> {
    LISTS.iter().filter(|list| list.path == path).map(List::name).collect()
}

impl List {
    /// The list's name, as refusals of a replica have it.
    fn name(&self) -> &'static str {
        self.field.1.map_or(self.field.0, |_| "inputs.sentences")
    }
}

/// One input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Element {
    start: usize,
    end: usize,
    tokens: u64,
}

/// Where a body can be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cutting {
    /// How the answer has to be joined.
    pub shape: Shape,
    /// The list's name, as refusals of a replica have it.
    pub field: &'static str,
    /// Of ranked documents so many are wanted; absent = all.
    pub top_n: Option<u64>,
    list: Span,
    elements: Vec<Element>,
}

/// Some inputs of a body, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which, counted from 0.
    pub inputs: Range<usize>,
    /// Their tokens, roughly.
    pub tokens: u64,
}

/// The list has more elements than [`INPUTS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyInputs {
    /// The list's name.
    pub field: &'static str,
    /// How many there are.
    pub given: usize,
}

impl Cutting {
    /// Where the body of a request for `path` can be cut; `None` where it had better stay whole.
    pub fn read(path: &str, body: &[u8]) -> Result<Option<Cutting>, TooManyInputs> {
        let Some((list, span, top_n)) = find(path, body) else { return Ok(None) };
        let field = list.name();
        let (mut elements, mut given, mut fits) = (Vec::new(), 0, true);
        let mut first = None;
        let read = json::elements(body, &span, |value| {
            given += 1;
            let first = *first.get_or_insert(value.kind);
            fits &= match list.elements {
                Elements::Texts => value.kind == Kind::Text,
                Elements::Lists => value.kind == Kind::List,
                Elements::TextsOrLists => {
                    matches!(value.kind, Kind::Text | Kind::List) && value.kind == first
                }
                Elements::Documents => matches!(value.kind, Kind::Text | Kind::Object),
                Elements::DocumentsOrLists => {
                    (value.kind == Kind::List) == (first == Kind::List)
                        && matches!(value.kind, Kind::Text | Kind::Object | Kind::List)
                }
            };
            if given <= INPUTS_MAX {
                let tokens = (value.text_bytes / BYTES_PER_TOKEN + value.bare) as u64 + TOKENS_AROUND;
                elements.push(Element { start: value.span.start, end: value.span.end, tokens });
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
        Ok(Some(Cutting { shape: list.shape, field, top_n, list: span, elements }))
    }

    /// How many inputs there are.
    pub fn inputs(&self) -> usize {
        self.elements.len()
    }

    /// Their tokens, roughly.
    pub fn tokens(&self) -> u64 {
        self.elements.iter().map(|element| element.tokens).sum()
    }

    /// Pieces of about `tokens` each, in the order of the inputs: equal ones, and none above the limits of a piece. An
    /// input that is above them by itself is a piece by itself.
    pub fn pieces(&self, tokens: u64) -> Vec<Piece> {
        let all = self.tokens();
        let count = all.div_ceil(tokens.clamp(1, PIECE_TOKENS_MAX)).max(1);
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut begun, mut before, mut in_piece) = (0, 0, 0);
        for (at, element) in self.elements.iter().enumerate() {
            // Where the next equal share begins, counted from the start so that no rounding adds up.
            let share_ends = (pieces.len() as u64 + 1) * all / count;
            let bytes = element.end - self.elements[begun].start;
            let full = at - begun == PIECE_INPUTS_MAX
                || bytes > PIECE_BYTES_MAX
                || in_piece + element.tokens > PIECE_TOKENS_MAX
                || before + element.tokens / 2 >= share_ends;
            if full && at > begun {
                pieces.push(Piece { inputs: begun..at, tokens: in_piece });
                (begun, in_piece) = (at, 0);
            }
            before += element.tokens;
            in_piece += element.tokens;
        }
        pieces.push(Piece { inputs: begun..self.elements.len(), tokens: in_piece });
        pieces
    }

    /// The body of a piece of `body`, which is the one that was read.
    pub fn body(&self, body: &[u8], piece: &Piece) -> Vec<u8> {
        self.parts(piece).map(|part| &body[part.start..part.end.min(body.len())]).concat()
    }

    /// How many bytes [`Cutting::body`] has of a body of `whole` bytes.
    pub fn body_bytes(&self, whole: usize, piece: &Piece) -> usize {
        self.parts(piece).map(|part| part.end.min(whole) - part.start).iter().sum()
    }

    /// What a piece is made of: up to its list, its inputs, and from the end of the list to that of the body.
    fn parts(&self, piece: &Piece) -> [Span; 3] {
        let Range { start, end } = piece.inputs;
        let inside = self.elements[start].start..self.elements[end - 1].end;
        [0..self.list.start + 1, inside, self.list.end - 1..usize::MAX]
    }
}

/// The list of inputs of a body, and how many of them are wanted back.
fn find(path: &str, body: &[u8]) -> Option<(&'static List, Span, Option<u64>)> {
    let members = json::object(body, MEMBERS_MAX)?;
    let mut there = LISTS
        .iter()
        .filter(|list| list.path == path)
        .filter_map(|list| Some((list, only(&members, body, list.field.0)?)));
    let (list, mut value) = there.next()?;
    // Whose list it is depends on the model behind the root, which nobody knows here.
    if path == ROOT && there.next().is_some() {
        return None;
    }
    let inner;
    if let Some(name) = list.field.1 {
        inner = json::members(body, &value.value.span, MEMBERS_MAX)?;
        value = only(&inner, body, name)?;
    }
    // Many first texts belong to as many second ones.
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

/// The member of this name if there is one, and one only; `null` is none.
fn only<'a>(members: &'a [Member], body: &[u8], name: &str) -> Option<&'a Member> {
    let mut named = members.iter().filter(|member| member.is(body, name));
    let member = named.next()?;
    (named.next().is_none() && &body[member.value.span.clone()] != b"null").then_some(member)
}

/// A replica's refusal of a piece, as of the whole: it names the element at fault by its index, which is counted on by
/// `first`, the index of the piece's first input.
pub fn as_of_the_whole(refusal: &[u8], field: &str, first: usize) -> Vec<u8> {
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

    fn cutting(path: &str, body: &str) -> Option<Cutting> {
        Cutting::read(path, body.as_bytes()).unwrap()
    }

    /// The bodies of all pieces of so many tokens, parsed.
    fn pieces(path: &str, body: &str, tokens: u64) -> Vec<Value> {
        let cutting = cutting(path, body).unwrap_or_else(|| panic!("{path} {body} can be cut"));
        let bodies = cutting.pieces(tokens).into_iter().map(|piece| cutting.body(body.as_bytes(), &piece));
        bodies.map(|body| serde_json::from_slice(&body).expect("a piece is JSON")).collect()
    }

    #[test]
    fn every_api_is_cut_where_it_has_its_inputs() {
        let check = |path: &str, body: &str, pointer: &str, shape: Shape, field: &str| {
            let found = cutting(path, body).unwrap_or_else(|| panic!("{path} {body} can be cut"));
            assert_eq!((found.shape, found.field, found.inputs()), (shape, field, 2), "{path} {body}");
            let whole: Value = serde_json::from_str(body).unwrap();
            for (at, piece) in pieces(path, body, 1).into_iter().enumerate() {
                let mut expected = whole.clone();
                let list = expected.pointer_mut(pointer).unwrap();
                *list = json!([list[at]]);
                assert_eq!(piece, expected, "{path}");
            }
        };
        let (data, rows) = (Shape::Data, Shape::Rows);
        check("/v1/embeddings", r#"{"model":"m","input":["a","b"],"user":"u"}"#, "/input", data, "input");
        check("/v1/embeddings", r#"{ "in\u0070ut" : [ [1, 2] , [3] ] }"#, "/input", data, "input");
        let mixed = r#"{"input":[{"text":"a"},"b"]}"#;
        check("/v1/embeddings", mixed, "/input", data, "input");
        check("/infinity/embeddings", mixed, "/input", data, "input");
        check("/voyage/v1/embeddings", r#"{"input":["a","b"]}"#, "/input", data, "input");
        check("/classify", r#"{"input":["a","b"]}"#, "/input", data, "input");
        check("/score", r#"{"text_1":"q","text_2":["a","b"]}"#, "/text_2", data, "text_2");
        let documents = r#"{"query":"q","documents":["a",{"text":"b","documents":["c"]}],"top_n":1}"#;
        check("/v2/rerank", documents, "/documents", Shape::Results, "documents");
        check("/rerank", documents, "/documents", Shape::Results, "documents");
        check("/rerank", r#"{"texts":["a","b"],"documents":["c","d"]}"#, "/texts", Shape::Ranks, "texts");
        check(
            "/rerank",
            r#"{"texts":null,"documents":["c","d"]}"#,
            "/documents",
            Shape::Results,
            "documents",
        );
        check("/embed", r#"{"inputs":["a","b"],"truncate":true}"#, "/inputs", rows, "inputs");
        check("/predict", r#"{"inputs":[["a"],["b","c"]]}"#, "/inputs", rows, "inputs");
        check("/tokenize", r#"{"inputs":["a","b"]}"#, "/inputs", rows, "inputs");
        check("/decode", r#"{"ids":[[1],[2]]}"#, "/ids", rows, "ids");
        let sentences = r#"{"inputs":{"source_sentence":"a","sentences":["b","c"]},"sentences":["d"]}"#;
        check("/similarity", sentences, "/inputs/sentences", rows, "inputs.sentences");
        check("/", r#"{"inputs":["a","b"]}"#, "/inputs", rows, "inputs");
        check("/", r#"{"texts":["a","b"],"query":"q"}"#, "/texts", Shape::Ranks, "texts");
        assert_eq!(cutting("/rerank", documents).unwrap().top_n, Some(1));
    }

    #[test]
    fn what_a_cut_could_change_stays_whole() {
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
            assert_eq!(cutting(path, body), None, "{path} {body}");
        }
        let rest = |bytes: usize| format!(r#"{{"input":["a","b"],"user":"{}"}}"#, "x".repeat(bytes - 22));
        assert!(cutting("/v1/embeddings", &rest(REST_BYTES_MAX)).is_some());
        assert!(cutting("/v1/embeddings", &rest(REST_BYTES_MAX + 1)).is_none());
    }

    #[test]
    fn the_limit_of_inputs_holds_at_it_and_one_past_it() {
        let read = |inputs: usize| {
            Cutting::read("/v1/embeddings", json!({"input": vec!["x"; inputs]}).to_string().as_bytes())
        };
        assert_eq!(read(INPUTS_MAX).unwrap().unwrap().inputs(), INPUTS_MAX);
        assert_eq!(read(INPUTS_MAX + 1), Err(TooManyInputs { field: "input", given: INPUTS_MAX + 1 }));
    }

    #[test]
    fn a_piece_is_within_its_limits_at_them_and_one_past_them() {
        let check = |element: String, inputs: usize, tokens: u64, expected: &[usize]| {
            let body = format!(r#"{{"input":[{}]}}"#, vec![element; inputs].join(","));
            let cutting = cutting("/v1/embeddings", &body).unwrap();
            let sizes: Vec<usize> = cutting.pieces(tokens).iter().map(|piece| piece.inputs.len()).collect();
            assert_eq!(sizes, expected);
        };
        let short = || "\"x\"".to_owned();
        check(short(), PIECE_INPUTS_MAX, u64::MAX, &[512]);
        check(short(), PIECE_INPUTS_MAX + 1, u64::MAX, &[512, 1]);
        check(short(), 10, 10, &[5, 5]);
        check(short(), 10, 6, &[2, 3, 2, 3]);
        // Two inputs that are a whole piece's tokens together, and a byte more.
        let half = |tokens: u64| format!("\"{}\"", "x".repeat((tokens as usize - 2) * 4));
        check(half(PIECE_TOKENS_MAX / 2), 4, u64::MAX, &[2, 2]);
        check(half(PIECE_TOKENS_MAX / 2 + 1), 4, u64::MAX, &[1, 1, 1, 1]);
        check(half(PIECE_TOKENS_MAX * 2), 2, u64::MAX, &[1, 1]);
        // Ids of many digits, and few tokens, are bounded by their bytes.
        let ids = format!("[{}]", " ".repeat(PIECE_BYTES_MAX / 2 - 3));
        check(ids.clone(), 4, u64::MAX, &[2, 2]);
        check(format!("{ids}  "), 4, u64::MAX, &[1, 1, 1, 1]);
    }

    #[test]
    fn a_refusal_of_a_piece_names_the_input_of_the_whole() {
        let check = |message: &str, expected: &str| {
            let refusal = |message: &str| json!({"error": {"message": message}}).to_string();
            let told = as_of_the_whole(refusal(message).as_bytes(), "input", 1024);
            assert_eq!(String::from_utf8(told).unwrap(), refusal(expected));
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
        /// Invariant 3, Order and identity: no input is lost, doubled or changed, and everything else is as it was.
        #[test]
        fn the_pieces_together_are_the_whole(
            documents in prop::collection::vec(element(), 2..40),
            mut rest in prop::collection::btree_map("(query|texts|input|[a-z]{0,8})", element(), 0..4),
            tokens in 1u64..60,
            pretty: bool,
        ) {
            rest.insert("documents".into(), documents.clone().into());
            let body = if pretty { serde_json::to_string_pretty(&rest) } else { serde_json::to_string(&rest) }.unwrap();
            let pieces = pieces("/v2/rerank", &body, tokens);
            let mut joined = Vec::new();
            for mut piece in pieces {
                let part = piece["documents"].as_array().unwrap().clone();
                prop_assert!(!part.is_empty());
                joined.extend(part);
                piece["documents"] = documents.clone().into();
                prop_assert_eq!(piece, json!(rest));
            }
            prop_assert_eq!(joined, documents);
        }

        /// Pieces are equal to within the largest input, so that none is waited for longer than the others.
        #[test]
        fn pieces_have_equal_work(lengths in prop::collection::vec(0usize..400, 2..300), tokens in 1u64..4000) {
            let inputs: Vec<String> = lengths.iter().map(|length| "x".repeat(*length)).collect();
            let body = json!({"input": inputs}).to_string();
            let cutting = cutting("/v1/embeddings", &body).unwrap();
            let pieces = cutting.pieces(tokens);
            let largest = cutting.elements.iter().map(|element| element.tokens).max().unwrap();
            prop_assert_eq!(pieces.iter().map(|piece| piece.tokens).sum::<u64>(), cutting.tokens());
            for piece in &pieces {
                prop_assert!(piece.tokens <= tokens + 2 * largest, "{} > {tokens} + 2 * {largest}", piece.tokens);
            }
        }

        #[test]
        fn no_body_makes_it_panic_or_cut_what_is_no_json(
            bytes in prop::collection::vec(prop::sample::select(br#"[]{}",:\ 1a"#.to_vec()), 0..24),
            head in prop::sample::select(vec!["", "{\"documents\":[", "{\"documents\":[\"a\",\"b\"", "{\"top_n\":"]),
        ) {
            let body = [head.as_bytes(), &bytes].concat();
            if let Ok(Some(cutting)) = Cutting::read("/v1/rerank", &body) {
                let whole: Result<Value, _> = serde_json::from_slice(&body);
                let body_of = |piece: &Piece| {
                    let made = cutting.body(&body, piece);
                    assert_eq!(cutting.body_bytes(body.len(), piece), made.len());
                    made
                };
                let pieces: Vec<_> = cutting.pieces(1).iter().map(body_of).collect();
                let valid = pieces.iter().all(|piece| serde_json::from_slice::<Value>(piece).is_ok());
                prop_assert_eq!(whole.is_ok(), valid, "all pieces are JSON if the whole is, and only then");
            }
        }
    }
}
