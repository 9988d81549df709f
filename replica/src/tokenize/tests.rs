//! Tests of the pool and of the tokenizer, with a vocabulary in which `w7` is the token 7.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use replica_api::input::{
    InvalidInput, OverlongPolicy, PairTruncation, Readable, TruncationMethod, TruncationSide,
};
use replica_core::tokenization::CHUNK_BYTES;
use tokio::runtime;

use super::*;
use crate::model::{ModelDir, TokenizerConfig};

/// Returns a `tokenizer.json` in which `w7` is the token 7, without special tokens. It enables truncation and padding.
fn tokenizer_file() -> String {
    let words = (1..100).map(|n| format!(r#", "w{n}": {n}"#)).collect::<String>();
    format!(
        r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
            "truncation": {{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
            "padding": {{"strategy": {{"Fixed": 8}}, "direction": "Right", "pad_to_multiple_of": null,
                         "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"}},
            "pre_tokenizer": {{"type": "WhitespaceSplit"}},
            "model": {{"type": "WordLevel", "unk_token": "[UNK]", "vocab": {{"[UNK]": 0{words}}}}}}}"#
    )
}

fn tokenizer(max_input_tokens: usize, lower_case: bool) -> TextTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer_file()).expect("a file");
    let readable = Readable { max_input_tokens, vocabulary: 100 };
    TextTokenizer::load_from(folder.path(), &TokenizerConfig::default(), lower_case, None, readable, 2)
        .expect("a tokenizer")
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

fn text_input(text: &str) -> TextInput {
    TextInput::One(text.to_owned())
}

fn encode(pool: &TokenizerPool, texts: &[&str]) -> Result<Vec<Box<[u32]>>, TokenizeError> {
    let texts = texts.iter().map(|text| text_input(text)).collect();
    let tokens = block_on(pool.encode(texts, EncodeOptions::WHOLE))?;
    Ok(tokens.into_iter().map(|tokens| tokens.ids).collect())
}

#[test]
fn tokens_are_returned_in_the_order_of_the_texts() {
    let pool = TokenizerPool::start(tokenizer(10_000, false), 3).expect("threads");
    // Every seventh of a thousand texts fills a chunk by itself.
    let long = "w1 ".repeat(CHUNK_BYTES / 3 + 1);
    let texts: Vec<String> =
        (0..1000).map(|i| if i % 7 == 0 { long.clone() } else { format!("w{} w2", i % 97 + 1) }).collect();
    let tokens = encode(&pool, &texts.iter().map(String::as_str).collect::<Vec<_>>()).expect("tokens");
    for (i, tokens) in tokens.iter().enumerate() {
        if i % 7 == 0 {
            assert_eq!(tokens.len(), CHUNK_BYTES / 3 + 1, "{i}");
        } else {
            assert_eq!(**tokens, [i as u32 % 97 + 1, 2], "{i}");
        }
    }
}

#[test]
fn the_truncation_and_padding_of_the_file_are_not_applied() {
    let pool = TokenizerPool::start(tokenizer(3, false), 1).expect("threads");
    assert_eq!(*encode(&pool, &["w1 w2 w3"]).expect("three tokens")[0], [1, 2, 3]);
    assert_eq!(*encode(&pool, &["w1"]).expect("one token")[0], [1]);
}

#[test]
fn the_first_unreadable_input_is_reported() {
    let pool = TokenizerPool::start(tokenizer(3, false), 2).expect("threads");
    let check = |texts: &[&str], index: usize, reason: InvalidInput| {
        assert_eq!(encode(&pool, texts), Err(TokenizeError::Unreadable { index, reason }));
    };
    let long = "w1 w1 w1 w1";
    check(&["w1", long, "w1", long], 1, InvalidInput::TooLong { limit: 3, given: 4 });
    check(&[long], 0, InvalidInput::TooLong { limit: 3, given: 4 });
    check(&["w1", "  "], 1, InvalidInput::Empty);
}

#[test]
fn a_model_trained_on_lower_case_gets_lower_case() {
    for (lower_case, id) in [(true, 5), (false, 0)] {
        let pool = TokenizerPool::start(tokenizer(3, lower_case), 1).expect("threads");
        assert_eq!(*encode(&pool, &["W5"]).expect("a token")[0], [id]);
    }
}

#[test]
fn jobs_beyond_the_limit_are_rejected_until_callers_disconnect() {
    let pool = TokenizerPool::start(tokenizer(3, false), 0).expect("no threads");
    let mut cx = Context::from_waker(Waker::noop());
    let mut waiting: Vec<Pin<Box<dyn Future<Output = _> + '_>>> = Vec::new();
    for _ in 0..MAX_JOBS {
        waiting.push(Box::pin(pool.encode(vec![text_input("w1")], EncodeOptions::WHOLE)));
        assert!(waiting.last_mut().expect("one").as_mut().poll(&mut cx).is_pending());
    }
    let one_more = pin!(pool.encode(vec![text_input("w1")], EncodeOptions::WHOLE));
    assert_eq!(one_more.poll(&mut cx), Poll::Ready(Err(TokenizeError::Full)));
    waiting.clear();
    thread::scope(|scope| {
        scope.spawn(|| pool.shared.work());
        while encode(&pool, &["w1"]) == Err(TokenizeError::Full) {
            thread::yield_now();
        }
        while pool.shared.queue.lock().open > 0 {
            thread::yield_now();
        }
        pool.shared.queue.lock().closed = true;
        pool.shared.work.notify_all();
    });
}

#[test]
fn a_huge_text_does_not_delay_a_short_one() {
    let pool = TokenizerPool::start(tokenizer(usize::MAX, false), 2).expect("threads");
    let huge = "w1 ".repeat(1 << 20);
    let mut waiting: Vec<Pin<Box<dyn Future<Output = _> + '_>>> = Vec::new();
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..4 {
        waiting.push(Box::pin(pool.encode(vec![text_input(&huge)], EncodeOptions::WHOLE)));
        assert!(waiting.last_mut().expect("one").as_mut().poll(&mut cx).is_pending());
    }
    for _ in 0..50 {
        assert_eq!(*encode(&pool, &["w7"]).expect("a token")[0], [7]);
    }
    // Two of the four would occupy both workers; these fifty took a fraction of the time of one.
    let pending = waiting.iter_mut().map(|huge| huge.as_mut().poll(&mut cx).is_pending());
    let pending = pending.filter(|pending| *pending).count();
    assert!(pending >= 2, "{pending} of 4 huge texts are still being worked on");
}

#[test]
fn too_long_inputs_are_cut_at_the_selected_end() {
    let pool = TokenizerPool::start(tokenizer(4, false), 1).expect("threads");
    let cut = |side, pair| OverlongPolicy::Truncate(TruncationMethod { side, pair });
    let check = |text: TextInput,
                 overlong: OverlongPolicy,
                 most: Option<usize>,
                 ids: &[u32],
                 types: Option<&[u32]>| {
        let options = EncodeOptions { prompt: None, overlong, most };
        let tokens = block_on(pool.encode(vec![text.clone()], options)).expect("tokens");
        assert_eq!((&*tokens[0].ids, tokens[0].types.as_deref()), (ids, types), "{text:?} {overlong:?}");
    };
    let (left, right) = (TruncationSide::Left, TruncationSide::Right);
    let longest = PairTruncation::LongestFirst;
    check(text_input("w1 w2 w3 w4 w5"), cut(right, longest), None, &[1, 2, 3, 4], None);
    check(text_input("w1 w2 w3 w4 w5"), cut(left, longest), None, &[2, 3, 4, 5], None);
    check(text_input("w1 w2 w3 w4 w5"), cut(right, longest), Some(2), &[1, 2], None);
    check(text_input("w1 w2 w3"), OverlongPolicy::Reject, Some(2), &[1, 2], None);
    let pair = |first: &str, second: &str| TextInput::Pair(first.into(), second.to_owned());
    let types = Some(&[0, 0, 1, 1][..]);
    check(pair("w1 w2", "w3 w4"), OverlongPolicy::Reject, None, &[1, 2, 3, 4], types);
    check(pair("w1 w2 w3", "w4 w5 w6"), cut(right, longest), None, &[1, 2, 4, 5], types);
    check(pair("w1 w2 w3", "w4 w5 w6"), cut(left, longest), None, &[2, 3, 5, 6], types);
    check(pair("w1", "w4 w5 w6 w7"), cut(right, longest), None, &[1, 4, 5, 6], Some(&[0, 1, 1, 1]));
    let second = PairTruncation::OnlySecond;
    check(pair("w1", "w4 w5 w6 w7"), cut(right, second), None, &[1, 4, 5, 6], Some(&[0, 1, 1, 1]));
    check(pair("w1 w2 w3 w4 w5", "w6 w7 w8"), cut(right, second), None, &[1, 2, 6, 7], types);
    check(pair("w1 w2 w3 w4 w5", "w6"), cut(right, second), None, &[1, 2, 3, 6], Some(&[0, 0, 0, 1]));
    check(pair("w1", "w2 w3 w4"), cut(right, second), Some(1), &[1, 2], Some(&[0, 1]));
}

#[test]
fn a_prompt_precedes_each_text() {
    let pool = TokenizerPool::start(tokenizer(4, true), 1).expect("threads");
    let options = EncodeOptions { prompt: Some("W9 ".into()), ..EncodeOptions::WHOLE };
    let tokens = block_on(pool.encode(vec![text_input("w1"), text_input("w2")], options)).expect("tokens");
    assert_eq!([&*tokens[0].ids, &*tokens[1].ids], [&[9, 1], &[9, 2]]);
}

#[test]
fn tokens_are_returned_with_offsets_and_decode_to_the_text() {
    let pool = TokenizerPool::start(tokenizer(2, false), 1).expect("threads");
    let tokens = block_on(pool.inspect(vec!["w1 é w22".to_owned()], None, true)).expect("tokens");
    let observed: Vec<(u32, &str, Option<usize>, Option<usize>)> =
        tokens[0].iter().map(|token| (token.id, token.text.as_str(), token.start, token.stop)).collect();
    let expected = [(1, "w1", Some(0), Some(2)), (0, "é", Some(3), Some(5)), (22, "w22", Some(6), Some(9))];
    assert_eq!(observed, expected);
    assert_eq!(block_on(pool.decode(vec![vec![1, 22]], true)), Ok(vec!["w1 w22".to_owned()]));
    let reason = InvalidInput::UnknownToken { id: 100, vocabulary: 100 };
    let unknown = block_on(pool.decode(vec![vec![1], vec![99, 100]], true));
    assert_eq!(unknown, Err(TokenizeError::Unreadable { index: 1, reason }));
}

/// Returns BERT's tokenizer with a few pieces.
fn word_pieces() -> TextTokenizer {
    let words = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "ab", "##a", "##b", "##ab", "c1", "##1", "!", "#", "-",
    ];
    let words: Vec<String> =
        words.iter().enumerate().map(|(id, word)| format!(r#""{word}": {id}"#)).collect();
    let special = |id: usize, word: &str| {
        format!(
            r#"{{"id": {id}, "content": "{word}", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}}"#
        )
    };
    let file = format!(
        r#"{{"version": "1.0", "added_tokens": [{}, {}], "decoder": null, "truncation": null, "padding": null,
            "normalizer": {{"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                            "strip_accents": null, "lowercase": true}},
            "pre_tokenizer": {{"type": "BertPreTokenizer"}},
            "post_processor": {{"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}},
            "model": {{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "\u0023\u0023",
                       "max_input_chars_per_word": 6, "vocab": {{{}}}}}}}"#,
        special(2, "[CLS]"),
        special(3, "[SEP]"),
        words.join(", ")
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tokenizer.json"), file).expect("a file");
    let readable = Readable { max_input_tokens: 12, vocabulary: 100 };
    TextTokenizer::load_from(folder.path(), &TokenizerConfig::default(), false, None, readable, 2)
        .expect("a tokenizer")
}

/// Random texts of pieces, punctuation, spaces, control characters, special tokens and characters beyond ASCII.
#[test]
fn the_word_piece_fast_path_equals_the_reference() {
    let short = word_pieces();
    assert!(short.pieces.is_some(), "BERT's tokenizer has a fast path");
    let mut long = word_pieces();
    long.pieces = None;
    let bits = [
        "a", "b", "A", "B", "ab", "c1", "1", "z", " ", "  ", "\t", "\n", "\r", "\u{b}", "\u{c}", "\u{0}",
        "\u{1}", "\u{7f}", "!", "#", "-", "_", "[", "[CLS]", "é", "\u{2003}", "字", "aaaaaa", "aaaaaaa",
    ];
    let cut = |side| OverlongPolicy::Truncate(TruncationMethod { side, pair: PairTruncation::LongestFirst });
    let option_sets = [
        EncodeOptions::WHOLE,
        EncodeOptions { overlong: cut(TruncationSide::Right), ..EncodeOptions::WHOLE },
        EncodeOptions { overlong: cut(TruncationSide::Left), ..EncodeOptions::WHOLE },
        EncodeOptions { most: Some(3), ..EncodeOptions::WHOLE },
        EncodeOptions { most: Some(0), overlong: cut(TruncationSide::Left), ..EncodeOptions::WHOLE },
    ];
    // Linear congruential generator.
    let mut state = 7_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..20_000 {
        let text: String = (0..next(12)).map(|_| bits[next(bits.len())]).collect();
        for options in &option_sets {
            let tokens = |way: &TextTokenizer| {
                way.encode(&text_input(&text), options, &mut text::FirstEncoding::default())
            };
            assert_eq!(tokens(&short), tokens(&long), "{text:?}, {options:?}");
        }
    }
}

/// Tokenizer of a model whose template writes `w50 QUERY w51 DOCUMENT w52`, with this limit of tokens.
fn templated(max_input_tokens: usize) -> Result<TextTokenizer, TokenizerLoadError> {
    let template = "w50 {{ messages[0].content }} w51 {{ messages[1].content }} w52\
                    {% if 'w66' in messages[1].content %}{{ raise_exception('no w66') }}{% endif %}";
    let folder = tempfile::tempdir().expect("a folder");
    let files = [
        (
            "config.json",
            r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100,
            "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 4,
            "max_position_embeddings": 64}"#
                .to_owned(),
        ),
        (
            "modules.json",
            r#"[{"idx": 0, "name": "0", "path": "",
             "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]"#
                .to_owned(),
        ),
        ("sentence_bert_config.json", r#"{"transformer_task": "text-generation", "module_output_name": "causal_logits", "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"}}}"#
                .to_owned()),
        ("config_sentence_transformers.json", r#"{"model_type": "CrossEncoder"}"#.to_owned()),
        ("1_LogitScore/config.json", r#"{"true_token_id": 1, "false_token_id": 2}"#.to_owned()),
        ("chat_template.jinja", template.to_owned()),
        ("tokenizer.json", tokenizer_file()),
        ("model.safetensors", "\u{2}\0\0\0\0\0\0\0{}".to_owned()),
    ];
    std::fs::create_dir(folder.path().join("1_LogitScore")).expect("a folder");
    for (path, text) in files {
        std::fs::write(folder.path().join(path), text).expect("a file");
    }
    let model = ModelDir::open(folder.path()).expect("a model");
    let readable = Readable { max_input_tokens, vocabulary: 100 };
    TextTokenizer::load(&model, readable, 1)
}

#[test]
fn a_templated_pair_is_cut_in_its_texts_and_never_in_the_template() {
    let cut = |side, pair| OverlongPolicy::Truncate(TruncationMethod { side, pair });
    let (left, right) = (TruncationSide::Left, TruncationSide::Right);
    let (second, longest) = (PairTruncation::OnlySecond, PairTruncation::LongestFirst);
    let pool = TokenizerPool::start(templated(8).expect("a tokenizer"), 1).expect("threads");
    let check = |query: &str, document: &str, overlong: OverlongPolicy, most: Option<usize>, ids: &[u32]| {
        let text = TextInput::Pair(query.into(), document.to_owned());
        let tokens = block_on(pool.encode(vec![text], EncodeOptions { prompt: None, overlong, most }));
        assert_eq!(*tokens.expect("tokens")[0].ids, *ids, "{query} | {document} {overlong:?} {most:?}");
    };
    let long = "w3 w4 w5 w6 w7 w8";
    check("w1 w2", "w3 w4 w5", OverlongPolicy::Reject, None, &[50, 1, 2, 51, 3, 4, 5, 52]);
    check("w1 w2", long, cut(right, second), None, &[50, 1, 2, 51, 3, 4, 5, 52]);
    check("w1 w2", long, cut(left, second), None, &[50, 1, 2, 51, 6, 7, 8, 52]);
    check("w1 w2", long, cut(right, longest), None, &[50, 1, 2, 51, 3, 4, 5, 52]);
    check(long, "w1 w2", cut(right, second), None, &[50, 3, 4, 5, 51, 1, 2, 52]);
    check(long, long, cut(right, second), None, &[50, 3, 4, 51, 3, 4, 5, 52]);
    check(long, long, cut(left, longest), None, &[50, 7, 8, 51, 6, 7, 8, 52]);
    check("w1", long, cut(right, second), Some(2), &[50, 1, 51, 3, 4, 52]);
    check("w1", long, cut(left, second), Some(4), &[50, 1, 51, 3, 4, 5, 6, 52]);
    check("w1", long, OverlongPolicy::Reject, Some(1), &[50, 1, 51, 3, 52]);
    check("w1", long, cut(right, second), Some(0), &[50, 1, 51, 52]);
    check("", "", cut(right, second), None, &[50, 51, 52]);
    // The texts contain the words of the template as well.
    check("w50 w51 w52", "w51 w50 w52 w51 w52", cut(right, second), None, &[50, 50, 51, 51, 51, 50, 52, 52]);
}

#[test]
fn a_query_of_megabytes_is_cut_before_it_is_joined_with_the_documents() {
    let pool = TokenizerPool::start(templated(8).expect("a tokenizer"), 1).expect("threads");
    for (side, kept) in [(TruncationSide::Right, [7, 1]), (TruncationSide::Left, [1, 9])] {
        let query: Arc<str> = format!("w7 {}w9", "w1 ".repeat(1 << 20)).into();
        let overlong = OverlongPolicy::Truncate(TruncationMethod { side, pair: PairTruncation::OnlySecond });
        let texts = (0..64).map(|_| TextInput::Pair(Arc::clone(&query), "w2 w3 w4 w5".to_owned())).collect();
        // Untruncated, each of 64 documents would take seconds.
        let tokens = block_on(pool.encode(texts, EncodeOptions { prompt: None, overlong, most: None }))
            .expect("tokens");
        let document = if side == TruncationSide::Right { [2, 3, 4] } else { [3, 4, 5] };
        let expected = [&[50][..], &kept, &[51], &document, &[52]].concat();
        assert!(tokens.iter().all(|tokens| *tokens.ids == *expected), "{:?} and not {expected:?}", tokens[0]);
        let text = TextInput::Pair(query, String::new());
        // Of the 128 bytes that are tokenized.
        let reason = InvalidInput::TooLong { limit: 8, given: 43 };
        let refused = block_on(pool.encode(vec![text], EncodeOptions::WHOLE));
        assert_eq!(refused, Err(TokenizeError::Unreadable { index: 0, reason }));
    }
}

#[test]
fn a_long_query_of_few_tokens_is_not_cut_when_truncation_is_off() {
    let pool = TokenizerPool::start(templated(8).expect("a tokenizer"), 1).expect("threads");
    let query: Arc<str> = format!("w1 {}w2", " ".repeat(128)).into();
    let read = |overlong| {
        let text = TextInput::Pair(Arc::clone(&query), "w3".to_owned());
        let tokens = block_on(pool.encode(vec![text], EncodeOptions { prompt: None, overlong, most: None }));
        tokens.expect("tokens").remove(0).ids.to_vec()
    };
    assert_eq!(read(OverlongPolicy::Reject), [50, 1, 2, 51, 3, 52]);
    let cut = TruncationMethod { side: TruncationSide::Right, pair: PairTruncation::OnlySecond };
    assert_eq!(read(OverlongPolicy::Truncate(cut)), [50, 1, 51, 3, 52]);
}

#[test]
fn inputs_that_a_template_rejects_are_reported_by_index() {
    let pool = TokenizerPool::start(templated(8).expect("a tokenizer"), 1).expect("threads");
    let pair = |document: &str| TextInput::Pair("w1".into(), document.to_owned());
    let check = |texts: Vec<TextInput>, error: TokenizeError| {
        assert_eq!(block_on(pool.encode(texts, EncodeOptions::WHOLE)), Err(error));
    };
    check(
        vec![pair("w2"), text_input("w2")],
        TokenizeError::Unreadable { index: 1, reason: InvalidInput::PairRequired },
    );
    let reason = "no w66, line 1 of the template".to_owned();
    check(vec![pair("w2"), pair("w66")], TokenizeError::Template { index: 1, reason });
    let reason = InvalidInput::TooLong { limit: 8, given: 9 };
    check(vec![pair("w1 w2 w3 w4 w5")], TokenizeError::Unreadable { index: 0, reason });
    // Three words of the template, and one word of each text.
    templated(5).expect("room for the shortest pair");
    let error = templated(4).map(drop).expect_err("no room").to_string();
    assert!(
        error.contains("makes 5 tokens of the shortest pair, but the model reads at most 4; raise"),
        "{error}"
    );
}

/// Loads a word tokenizer with `<s>` before a text and `</s>` after it, if `ends` says so, beside a
/// tokenizer_config.json.
fn load_with_config(ends: [bool; 2], config: &str, vocabulary: usize) -> Result<TextTokenizer, String> {
    let special = |name: &str| format!(r#"{{"SpecialToken": {{"id": "{name}", "type_id": 0}}}}"#);
    let text = r#"{"Sequence": {"id": "A", "type_id": 0}}"#.to_owned();
    let parts = [ends[0].then(|| special("<s>")), Some(text), ends[1].then(|| special("</s>"))];
    let single: Vec<String> = parts.into_iter().flatten().collect();
    let added = |id: u32, name: &str| {
        format!(
            r#"{{"id": {id}, "content": "{name}", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}}"#
        )
    };
    let file = format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
            "added_tokens": [{}, {}, {}], "pre_tokenizer": {{"type": "WhitespaceSplit"}},
            "post_processor": {{"type": "TemplateProcessing", "single": [{}], "pair": [{}],
                "special_tokens": {{"<s>": {{"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
                    "</s>": {{"id": "</s>", "ids": [2], "tokens": ["</s>"]}}}}}},
            "model": {{"type": "WordLevel", "unk_token": "<unk>",
                "vocab": {{"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}}}}}}"#,
        added(0, "<unk>"),
        added(1, "<s>"),
        added(2, "</s>"),
        single.join(", "),
        single.join(", "),
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tokenizer.json"), file).expect("a file");
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("a file");
    let config = TokenizerConfig::read(folder.path(), "qwen2", None).map_err(|error| error.to_string())?;
    let readable = Readable { max_input_tokens: 12, vocabulary };
    TextTokenizer::load_from(folder.path(), &config, false, None, readable, 2)
        .map_err(|error| error.to_string())
}

/// Keys of all test files.
const NAMES: &str = r#""tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>""#;

/// With last-token pooling, a missing end-of-text token changes the vector.
#[test]
fn the_tokens_around_a_text_are_those_that_both_files_state() {
    let ids = |tokenizer: TextTokenizer| {
        let pool = TokenizerPool::start(tokenizer, 1).expect("a thread");
        block_on(pool.encode(vec![text_input("a b")], EncodeOptions::WHOLE))
            .expect("tokens")
            .remove(0)
            .ids
            .to_vec()
    };
    for (ends, keys, expected) in [
        ([true, false], r#""add_bos_token": true, "add_eos_token": false"#, vec![1, 3, 4]),
        ([true, true], r#""add_bos_token": true, "add_eos_token": true"#, vec![1, 3, 4, 2]),
        // The tokenizer class of gte-Qwen2 appends it in code.
        (
            [false, false],
            r#""add_eos_token": true, "auto_map": {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer",
                "tokenization_qwen.Qwen2TokenizerFast"]}"#,
            vec![3, 4, 2],
        ),
    ] {
        let loaded = load_with_config(ends, &format!("{{{NAMES}, {keys}}}"), 5)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(ids(loaded), expected, "{keys}");
    }
    // Like e5-mistral, if its tokenizer.json had no end-of-text token.
    for (ends, keys, sentence) in [
        (
            [true, false],
            r#""add_eos_token": true"#,
            "`add_eos_token` is true, but tokenizer.json does the opposite",
        ),
        ([true, true], r#""add_eos_token": false"#, "`add_eos_token` is false, but"),
        ([true, false], r#""add_bos_token": false"#, "`add_bos_token` is false, but"),
        (
            [true, false],
            r#""sep_token": "b""#,
            "`sep_token` = \"b\" is not a special token of tokenizer.json",
        ),
    ] {
        let error = load_with_config(ends, &format!("{{{NAMES}, {keys}}}"), 5).err().expect("a refusal");
        assert!(error.contains("tokenizer_config.json") && error.contains(sentence), "{error}");
    }
}

#[test]
fn ids_beyond_the_models_vocabulary_are_rejected_on_loading() {
    let error = load_with_config([true, false], &format!("{{{NAMES}}}"), 4).err().expect("a refusal");
    assert!(error.contains("1 tokens have ids beyond the model's vocabulary (`vocab_size` = 4"), "{error}");
    assert!(error.contains("`b` = 4"), "{error}");
}
