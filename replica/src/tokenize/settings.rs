//! Consistency of `tokenizer.json` with the files beside it.
//!
//! Version 5 of transformers rebuilds several tokenizers from the vocabulary and the keys of `tokenizer_config.json`;
//! version 4 uses `tokenizer.json` as it is, except for some keys. Where both files agree, all versions agree. Where
//! they differ, the tokens depend on the version, and the model is rejected with the key. The tokenizer is inspected in
//! its serialized form, because its parts are not accessible otherwise.

use serde_json::Value;
use tokenizers::normalizers::{Lowercase, Sequence};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{NormalizerWrapper, Tokenizer};

use super::vocabulary;
use crate::model::{TOKENS, TokenizerClass, TokenizerConfig, WordOptions, shortened_name};

/// Compares the files and applies the changes that the library applies; returns the problems.
pub(super) fn apply(
    tokenizer: &mut Tokenizer,
    config: &TokenizerConfig,
    lower_case: bool,
    embeddings: usize,
) -> Vec<String> {
    let mut problems = vocabulary::problems(tokenizer, embeddings);
    if !problems.is_empty() {
        // The checks below serialize the vocabulary, with the holes below its largest id, and tokenize texts.
        return problems;
    }
    if config.exists {
        check_tokens(tokenizer, config, &mut problems);
        check_class(tokenizer, config, &mut problems);
        check_ends(tokenizer, config, &mut problems);
        // It is unknown which of the files is right.
        for problem in &mut problems {
            *problem = format!("{}: {problem}", TokenizerConfig::FILE);
        }
    }
    if lower_case && let Err(problem) = lower(tokenizer) {
        problems.push(problem);
    }
    problems
}

/// Returns the serialized part.
fn written<T: serde::Serialize>(part: Option<&T>) -> Value {
    part.and_then(|part| serde_json::to_value(part).ok()).unwrap_or(Value::Null)
}

/// Checks that every token named by a key is a special token of the tokenizer: the library would turn it into one.
fn check_tokens(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    let added = tokenizer.get_added_tokens_decoder();
    let is_special = |token: &str| added.values().any(|known| known.content == token && known.special);
    let named = config.tokens.iter().filter_map(|(key, token)| Some((key, token.as_ref()?)));
    let others = config.others.iter().map(|(key, token)| (key, token));
    for (key, token) in named.chain(others) {
        if !is_special(token) {
            problems.push(format!(
                "`{key}` = {:?} is not a special token of tokenizer.json, but the library would turn it into one; \
                 save the tokenizer again",
                shortened_name(token)
            ));
        }
    }
    let defaults = TOKENS.iter().filter(|name| !config.tokens.contains_key(**name));
    for (name, token) in defaults.filter_map(|name| Some((name, config.class.default_token(name)?))) {
        if !is_special(token) {
            problems.push(format!(
                "`{name}` is missing; its default for this `tokenizer_class` is {token:?}, which is not a special \
                 token of tokenizer.json; set `{name}`, or set `tokenizer_class` to TokenizersBackend"
            ));
        }
    }
    for added_token in &config.added {
        let Some(known) = added.get(&added_token.id).filter(|known| known.content == added_token.content)
        else {
            // Such tokens may be part of the vocabulary instead.
            if added_token.key == "added_tokens.json"
                && tokenizer.token_to_id(&added_token.content) == Some(added_token.id)
            {
                continue;
            }
            problems.push(format!(
                "`{}`: the `content` of token {} is {:?}, but tokenizer.json differs; save the tokenizer again",
                added_token.key, added_token.id, shortened_name(&added_token.content)
            ));
            continue;
        };
        let flags = [
            ("special", known.special, false),
            ("lstrip", known.lstrip, false),
            ("rstrip", known.rstrip, false),
            ("single_word", known.single_word, false),
            // The default is the opposite of `special`.
            ("normalized", known.normalized, !added_token.flags.get("special").copied().unwrap_or(false)),
        ];
        if added_token.key == "added_tokens.json" {
            continue;
        }
        for (flag, known, default) in flags {
            if added_token.flags.get(flag).copied().unwrap_or(default) != known {
                problems.push(format!(
                    "`{}`: `{flag}` of {:?} is {}, but {known} in tokenizer.json; save the tokenizer again",
                    added_token.key,
                    shortened_name(&added_token.content),
                    !known
                ));
            }
        }
    }
    // Rows are computed without padding, but the library requires a padding token.
    if config.token("pad_token").is_none() {
        problems.push(
            "`pad_token` is missing; sentence-transformers needs it to compute several texts at once; set it"
                .to_owned(),
        );
    }
}

/// Compares the tokenizer that a class builds from the keys with tokenizer.json.
fn check_class(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    use TokenizerClass::{Backend, Bert, Gemma, Llama, MpNet, Qwen2, Roberta, XlmRoberta};
    let normalizer = written(tokenizer.get_normalizer());
    let pre_tokenizer = written(tokenizer.get_pre_tokenizer());
    let model = written(Some(tokenizer.get_model()));
    let kind = |part: &Value| part["type"].as_str().unwrap_or_default().to_owned();
    let expected = match config.class {
        Backend => return,
        Bert | MpNet => "WordPiece",
        Roberta | Llama | Qwen2 | Gemma => "BPE",
        XlmRoberta => "Unigram",
    };
    // The tokenizer of Llama 3 is byte-level, and then transformers uses tokenizer.json as it is.
    if config.class == Llama && all_kinds(&pre_tokenizer).iter().any(|kind| kind == "ByteLevel") {
        return;
    }
    let parts = [all_kinds(&normalizer), all_kinds(&pre_tokenizer)].concat();
    let has = |kind: &str| parts.iter().any(|known| known == kind);
    let fits = kind(&model) == expected
        && match config.class {
            Bert | MpNet => has("BertNormalizer") && has("BertPreTokenizer"),
            Roberta => has("ByteLevel"),
            Qwen2 => has("ByteLevel") && has("NFC"),
            XlmRoberta => has("Metaspace"),
            Llama => has("Metaspace") || has("Prepend"),
            Gemma => has("Replace") && !has("Prepend") && !has("Metaspace"),
            Backend => true,
        };
    if !fits {
        problems.push(format!(
            "`tokenizer_class` names another kind of tokenizer than tokenizer.json ({} of {}); set it to \
             TokenizersBackend if tokenizer.json is right",
            kind(&model),
            parts.join(", ")
        ));
        return;
    }
    if matches!(config.class, Bert | MpNet) {
        check_words(&normalizer, config.words, problems);
    }
    // Unigram models store the unknown token's id, others its text.
    let number = model["unk_id"].as_u64().and_then(|id| u32::try_from(id).ok());
    let of_number = number.and_then(|id| tokenizer.id_to_token(id));
    let unknown = model["unk_token"].as_str().or(of_number.as_deref());
    if let (Some(known), Some(given)) = (unknown, config.token("unk_token"))
        && known != given
    {
        problems.push(format!(
            "`unk_token` is {:?}, but {:?} in tokenizer.json; save the tokenizer again",
            shortened_name(given),
            shortened_name(known)
        ));
    }
    check_prefix(&normalizer, &pre_tokenizer, config, problems);
    check_surroundings(tokenizer, config, problems);
}

/// Returns the type of a part, and the types of its members if it is a sequence.
fn all_kinds(part: &Value) -> Vec<String> {
    let own = part["type"].as_str().filter(|kind| *kind != "Sequence").map(str::to_owned);
    let inner = ["normalizers", "pretokenizers"].iter().filter_map(|key| part[*key].as_array()).flatten();
    own.into_iter().chain(inner.flat_map(all_kinds)).collect()
}

fn check_words(normalizer: &Value, words: WordOptions, problems: &mut Vec<String>) {
    let WordOptions { lower_case, strip_accents, chinese } = words;
    let lowers = normalizer["lowercase"] == Value::Bool(true);
    for (key, given, known) in [
        ("do_lower_case", lower_case, lowers),
        (
            "strip_accents",
            strip_accents.unwrap_or(lower_case),
            normalizer["strip_accents"].as_bool().unwrap_or(lowers),
        ),
        ("tokenize_chinese_chars", chinese, normalizer["handle_chinese_chars"] == Value::Bool(true)),
        ("tokenizer_class", true, normalizer["clean_text"] == Value::Bool(true)),
    ] {
        if given != known {
            problems.push(format!(
                "`{key}` is {given} (or that is the default of the class), but tokenizer.json does the opposite; set \
                 both to the value that the model was trained with"
            ));
        }
    }
}

/// Compares the settings for the space before a text.
fn check_prefix(
    normalizer: &Value,
    pre_tokenizer: &Value,
    config: &TokenizerConfig,
    problems: &mut Vec<String>,
) {
    use TokenizerClass::{Llama, Qwen2, Roberta, XlmRoberta};
    let inner = pre_tokenizer["pretokenizers"].as_array();
    let parts: Vec<&Value> = inner.map_or(vec![pre_tokenizer], |parts| parts.iter().collect());
    let of_kind = |kind: &str| parts.iter().find(|part| part["type"] == kind).copied();
    let (given, known) = match config.class {
        Roberta | Qwen2 => {
            let known = of_kind("ByteLevel").map(|part| part["add_prefix_space"] == Value::Bool(true));
            (config.add_prefix_space.unwrap_or(false), known)
        }
        XlmRoberta | Llama => {
            let scheme = of_kind("Metaspace").map(|part| part["prepend_scheme"].clone());
            let prepends = all_kinds(normalizer).iter().any(|kind| kind == "Prepend");
            let legacy = config.legacy.unwrap_or(false);
            let adds_space_everywhere = match &scheme {
                Some(scheme) if *scheme == "never" => None,
                Some(scheme) => Some(*scheme == "always"),
                None => prepends.then_some(true),
            };
            if config.class == Llama && adds_space_everywhere.is_some_and(|everywhere| everywhere != legacy) {
                problems.push(format!(
                    "`legacy` is {legacy} (or absent), so this `tokenizer_class` adds a space {}, but tokenizer.json \
                     does the opposite; set the value that the model was trained with",
                    if legacy { "after every special token as well" } else { "at the beginning of a text only" }
                ));
            }
            let known = scheme.map(|scheme| scheme != "never");
            (config.add_prefix_space.unwrap_or(true), known.or(prepends.then_some(true)))
        }
        _ => return,
    };
    if known.is_some_and(|known| known != given) {
        problems.push(format!(
            "`add_prefix_space` is {given}, but tokenizer.json does the opposite; set both to the value that the \
             model was trained with"
        ));
    }
}

/// Returns the ids before and after a text that the tokenizer adds.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let text = tokenizer.encode_fast("a", false).ok()?.get_ids().to_vec();
    let whole = tokenizer.encode_fast("a", true).ok()?.get_ids().to_vec();
    let start = whole.windows(text.len().max(1)).position(|ids| ids == text)?;
    Some((whole[..start].to_vec(), whole[start + text.len()..].to_vec()))
}

/// Compares the special tokens around a text, for classes that add them themselves.
fn check_surroundings(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    use TokenizerClass::{Bert, MpNet, Roberta, XlmRoberta};
    let names = match config.class {
        Bert | MpNet | Roberta => ["cls_token", "sep_token"],
        XlmRoberta => ["bos_token", "eos_token"],
        _ => return,
    };
    let Some((before, after)) = around(tokenizer) else { return };
    for (name, ids) in names.into_iter().zip([before, after]) {
        // Without an entry in the file, a class uses the token of its own vocabulary.
        let token = config.token(name).or_else(|| config.class.default_token(name));
        let id = token.and_then(|token| tokenizer.token_to_id(token));
        if ids.as_slice() != id.as_slice() {
            problems.push(format!(
                "`{name}` is {:?} for this `tokenizer_class`, but tokenizer.json adds other tokens ({ids:?}); save the \
                 tokenizer again",
                shortened_name(token.unwrap_or("absent"))
            ));
        }
    }
}

/// Compares the markers of the beginning and the end of a text.
fn check_ends(tokenizer: &mut Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    let Some((before, after)) = around(tokenizer) else { return };
    let id = |name: &str| config.token(name).and_then(|token| tokenizer.token_to_id(token));
    let has_bos = id("bos_token").is_some_and(|id| before.contains(&id));
    let has_eos = id("eos_token").is_some_and(|id| after.contains(&id));
    // The tokenizer class of gte-Qwen2, with which the model was trained, appends the token in code.
    if config.appends_in_code && config.add_eos == Some(true) && !has_eos {
        match (config.token("eos_token"), id("eos_token")) {
            (Some(token), Some(id)) => match appending(token, id) {
                Ok(template) => {
                    tokenizer.with_post_processor(Some(template));
                }
                Err(problem) => problems.push(problem),
            },
            _ => problems.push("`add_eos_token` is true, but there is no `eos_token`; set it".to_owned()),
        }
        return;
    }
    for (key, given, known) in
        [("add_bos_token", config.add_bos, has_bos), ("add_eos_token", config.add_eos, has_eos)]
    {
        if given.is_some_and(|given| given != known) {
            problems.push(format!(
                "`{key}` is {}, but tokenizer.json does the opposite, and versions of transformers differ in which \
                 one they use; save the tokenizer again with the post-processor that the model was trained with",
                !known
            ));
        }
    }
}

/// Returns a post-processor that appends this token to a text.
fn appending(token: &str, id: u32) -> Result<PostProcessorWrapper, String> {
    let template = TemplateProcessing::builder()
        .try_single(format!("$A:0 {token}:0"))
        .and_then(|builder| builder.try_pair(format!("$A:0 {token}:0 $B:1 {token}:1")))?
        .special_tokens(vec![(token, id)])
        .build()
        .map_err(|error| error.to_string())?;
    Ok(PostProcessorWrapper::Template(template))
}

/// Adds lower-casing of texts, except for the names of special tokens, before all other steps; a tokenizer that
/// lower-cases by itself is left unchanged.
fn lower(tokenizer: &mut Tokenizer) -> Result<(), String> {
    let normalizer = tokenizer.get_normalizer().cloned();
    let kinds = written(normalizer.as_ref());
    let lowers = |part: &Value| part["type"] == "Lowercase" || part["lowercase"] == Value::Bool(true);
    let parts = kinds["normalizers"].as_array();
    if lowers(&kinds) || parts.into_iter().flatten().any(lowers) {
        return Ok(());
    }
    let mut steps = vec![NormalizerWrapper::Lowercase(Lowercase)];
    steps.extend(normalizer);
    let steps = NormalizerWrapper::Sequence(Sequence::new(steps));
    tokenizer.with_normalizer(Some(steps)).map(drop).map_err(|error| error.to_string())
}
