//! Tokens of texts and pairs equal those of `transformers`, whole and truncated, for all kinds of tokenizers of the
//! families. The references are beside the fixtures (made by `tests/golden/make_tokenizers.py`).

use std::path::{Path, PathBuf};

use replica::model::TokenizerConfig;
use replica::tokenize::{EncodeOptions, TextInput, TextTokenizer, Tokenized, TokenizerPool};
use replica_api::input::{OverlongPolicy, PairTruncation, Readable, TruncationMethod, TruncationSide};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    texts: Vec<TextCase>,
    pairs: Vec<PairCase>,
    cut: Vec<CutCase>,
}

#[derive(Deserialize)]
struct Tokens {
    ids: Vec<u32>,
    types: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct TextCase {
    text: String,
    #[serde(flatten)]
    tokens: Tokens,
    /// Offsets in characters.
    offsets: Vec<(usize, usize)>,
}

#[derive(Deserialize)]
struct PairCase {
    first: String,
    second: String,
    #[serde(flatten)]
    tokens: Tokens,
}

#[derive(Deserialize)]
struct CutCase {
    side: String,
    max_tokens: usize,
    texts: Vec<Tokens>,
    pairs: Vec<Tokens>,
}

fn fixtures() -> Vec<PathBuf> {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families");
    let folders = std::fs::read_dir(&families).expect("the fixtures").flatten().map(|entry| entry.path());
    let mut folders: Vec<PathBuf> = folders.filter(|folder| folder.join("tokens.json").exists()).collect();
    folders.sort();
    folders
}

fn pool(folder: &Path, max_input_tokens: usize, tells_types_apart: bool) -> TokenizerPool {
    let readable = Readable { max_input_tokens, vocabulary: 1 << 20 };
    let types = if tells_types_apart { 2 } else { 1 };
    let config = TokenizerConfig::default();
    let tokenizer =
        TextTokenizer::load_from(folder, &config, false, None, readable, types).expect("a tokenizer");
    TokenizerPool::start(tokenizer, 2).expect("threads")
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

#[track_caller]
fn check(given: &[Tokenized], expected: &[&Tokens], description: &str) {
    assert_eq!(given.len(), expected.len(), "{description}");
    for (i, (given, expected)) in given.iter().zip(expected).enumerate() {
        assert_eq!(*given.ids, *expected.ids, "{description}, case {i}");
        // Types that are all 0 are omitted.
        let types = expected.types.as_deref().filter(|types| types.iter().any(|kind| *kind != 0));
        assert_eq!(given.types.as_deref(), types, "{description}, case {i}");
    }
}

#[test]
fn every_kind_of_tokenizer_equals_transformers() {
    let folders = fixtures();
    assert!(folders.len() >= 5, "{folders:?}");
    for folder in folders {
        let text = std::fs::read_to_string(folder.join("tokens.json")).expect("the reference");
        let reference: Reference = serde_json::from_str(&text).expect("the reference");
        let apart = reference.pairs.iter().any(|pair| pair.tokens.types.is_some());
        let texts: Vec<TextInput> =
            reference.texts.iter().map(|case| TextInput::One(case.text.clone())).collect();
        // For a single pair with an empty second text, transformers treats it as a text without a pair; for a list of
        // pairs, as in reranking, it does not. Here a pair is always a pair, so these cases are skipped.
        let whole_pair = |index: &usize| !reference.pairs[*index].second.is_empty();
        let kept: Vec<usize> = (0..reference.pairs.len()).filter(whole_pair).collect();
        let pair = |index: &usize| {
            let PairCase { first, second, .. } = &reference.pairs[*index];
            TextInput::Pair(first.as_str().into(), second.clone())
        };
        let pairs: Vec<TextInput> = kept.iter().map(pair).collect();
        let description =
            folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();

        let whole = pool(&folder, 1 << 20, apart);
        let given = block_on(whole.encode(texts.clone(), EncodeOptions::WHOLE)).expect("tokens");
        let expected: Vec<&Tokens> = reference.texts.iter().map(|case| &case.tokens).collect();
        check(&given, &expected, &format!("{description}, texts"));
        let given = block_on(whole.encode(pairs.clone(), EncodeOptions::WHOLE)).expect("tokens");
        let expected: Vec<&Tokens> = kept.iter().map(|index| &reference.pairs[*index].tokens).collect();
        check(&given, &expected, &format!("{description}, pairs"));
        check_offsets(&whole, &reference.texts, &description);

        for cut in &reference.cut {
            let side = if cut.side == "left" { TruncationSide::Left } else { TruncationSide::Right };
            let overlong =
                OverlongPolicy::Truncate(TruncationMethod { side, pair: PairTruncation::LongestFirst });
            let options = EncodeOptions { prompt: None, overlong, most: None };
            let pool = pool(&folder, cut.max_tokens, apart);
            let description = format!("{description}, {} cut to {}", cut.side, cut.max_tokens);
            let given = block_on(pool.encode(texts.clone(), options.clone())).expect("tokens");
            check(&given, &cut.texts.iter().collect::<Vec<_>>(), &format!("{description}, texts"));
            let given = block_on(pool.encode(pairs.clone(), options)).expect("tokens");
            let expected: Vec<&Tokens> = kept.iter().map(|index| &cut.pairs[*index]).collect();
            check(&given, &expected, &format!("{description}, pairs"));
        }
    }
}

#[derive(Deserialize)]
struct TemplateReference {
    pairs: Vec<TemplatedPair>,
}

#[derive(Deserialize)]
struct TemplatedPair {
    query: String,
    document: String,
    most: usize,
    ids: Vec<u32>,
    /// Whether only tokens of the document are missing.
    whole: bool,
}

/// References of `tests/golden/make_yes_no.py`.
#[test]
fn a_pair_in_a_chat_template_has_the_tokens_of_sentence_transformers() {
    for (fixture, template) in [
        (
            "qwen3_yes_no",
            [
                "<|im_start|>Does it answer?\nq: ",
                "\nd: ",
                "<|im_end|>\n<|im_start|>{\"be\": [1, \"<brief>\"]}\n",
            ],
        ),
        ("llama_yes_no", ["<s> text ", "\nfor ", " is it?"]),
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families").join(fixture);
        let text = std::fs::read_to_string(folder.join("pairs.json")).expect("the reference");
        let TemplateReference { pairs } = serde_json::from_str(&text).expect("the reference");
        let model = replica::model::ModelDir::open(&folder).expect("the model");
        let (mut whole, mut cut) = (0, 0);
        for TemplatedPair { query, document, most, ids, whole: same } in pairs {
            let readable = Readable { max_input_tokens: most, vocabulary: 330 };
            let tokenizer = TextTokenizer::load(&model, readable, 1);
            let pool = TokenizerPool::start(tokenizer.expect("a tokenizer"), 1).expect("a thread");
            let overlong = OverlongPolicy::Truncate(TruncationMethod {
                side: TruncationSide::Right,
                pair: PairTruncation::OnlySecond,
            });
            let text = TextInput::Pair(query.as_str().into(), document.clone());
            let given =
                block_on(pool.encode(vec![text], EncodeOptions { prompt: None, overlong, most: None }));
            let given = given.expect("tokens").remove(0);
            let description = format!("{fixture}, {query:?} and {document:?} in {most}");
            whole += usize::from(same && ids.len() < most);
            cut += usize::from(ids.len() == most);
            if same {
                assert_eq!((given.ids.to_vec(), given.types), (ids, None), "{description}");
                continue;
            }
            // The reference has lost the query or the whole document; here the template is complete, with parts of
            // both.
            assert_eq!(given.ids.len(), most, "{description}");
            let read = block_on(pool.decode(vec![given.ids.to_vec()], false)).expect("a text").remove(0);
            let [before, between, behind] = template;
            let inner = read.strip_prefix(before).and_then(|read| read.strip_suffix(behind));
            let (first, second) = inner.and_then(|inner| inner.split_once(between)).expect(&description);
            assert!(!first.is_empty() && !second.is_empty(), "{description}: {read:?}");
        }
        assert!(whole >= 12 && cut >= 9, "{fixture}: {whole} whole and {cut} cut");
    }
}

/// Compares the offsets of tokens, which are in bytes; the reference counts characters.
fn check_offsets(pool: &TokenizerPool, cases: &[TextCase], description: &str) {
    let texts = cases.iter().map(|case| case.text.clone()).collect();
    let given = block_on(pool.inspect(texts, None, true)).expect("tokens");
    for (case, given) in cases.iter().zip(given) {
        let byte = |at: usize| case.text.char_indices().nth(at).map_or(case.text.len(), |(byte, _)| byte);
        assert_eq!(given.iter().map(|token| token.id).collect::<Vec<_>>(), case.tokens.ids, "{description}");
        for (token, (start, stop)) in given.iter().zip(&case.offsets) {
            if !token.special {
                let places = (token.start, token.stop);
                let (start, stop) = (byte(*start), byte(*stop));
                // In characters, a part of a character is the whole character.
                let covered = places.0 >= Some(start) && places.1 <= Some(stop);
                assert!(covered, "{description}: {token:?} of {:?} is at {start}..{stop}", case.text);
            }
        }
    }
}
