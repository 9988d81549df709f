//! What the files beside `tokenizer.json` say, against what the tokenizer does.
//!
//! Version 5 of transformers makes several tokenizers anew from the vocabulary and the keys of `tokenizer_config.json`;
//! version 4 takes `tokenizer.json` as it is, but for some keys. Where both files say the same, all versions agree.
//! Where they do not, a model has other tokens for each, and it is refused by the key. What is read here of the
//! tokenizer is what it would write to a file, since its parts are not otherwise told apart.

use serde_json::Value;
use tokenizers::normalizers::{Lowercase, Sequence};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{NormalizerWrapper, Tokenizer};

use crate::model::{TOKENS, TokenizerClass, TokenizerConfig, Words};

/// Compares, and changes what the library changes; returns the problems.
pub(super) fn apply(
    tokenizer: &mut Tokenizer,
    config: &TokenizerConfig,
    lower_case: bool,
    vocabulary: usize,
) -> Vec<String> {
    let mut problems = Vec::new();
    beyond(tokenizer, vocabulary, &mut problems);
    if config.is_there {
        let first = problems.len();
        check_tokens(tokenizer, config, &mut problems);
        check_class(tokenizer, config, &mut problems);
        check_ends(tokenizer, config, &mut problems);
        // Which of the files is right cannot be told.
        for problem in &mut problems[first..] {
            *problem = format!("{}: {problem}", TokenizerConfig::FILE);
        }
    }
    if lower_case && let Err(problem) = lower(tokenizer) {
        problems.push(problem);
    }
    problems
}

/// Ids that the model has no vector for: a text with such a token would fail, on some day.
fn beyond(tokenizer: &Tokenizer, vocabulary: usize, problems: &mut Vec<String>) {
    let mut tokens: Vec<(String, u32)> =
        tokenizer.get_vocab(true).into_iter().filter(|(_, id)| *id as usize >= vocabulary).collect();
    tokens.sort_by_key(|(_, id)| *id);
    if let [(token, id), ..] = tokens.as_slice() {
        problems.push(format!(
            "{} tokens have ids beyond the model's vocabulary (`vocab_size` = {vocabulary} in config.json), the first is \
             `{token}` = {id}; take the tokenizer that belongs to the weights, or add rows to the table of words",
            tokens.len()
        ));
    }
}

/// The part as it would be written.
fn written<T: serde::Serialize>(part: Option<&T>) -> Value {
    part.and_then(|part| serde_json::to_value(part).ok()).unwrap_or(Value::Null)
}

/// Every token that a key names is a special one of the tokenizer: the library would make one of it.
fn check_tokens(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    let added = tokenizer.get_added_tokens_decoder();
    let is_special = |token: &str| added.values().any(|known| known.content == token && known.special);
    let named = config.tokens.iter().filter_map(|(key, token)| Some((key, token.as_ref()?)));
    let others = config.others.iter().map(|(key, token)| (key, token));
    for (key, token) in named.chain(others) {
        if !is_special(token) {
            problems.push(format!(
                "`{key}` = {token:?} is not a special token of tokenizer.json, and the library would make it one; save the \
                 tokenizer again"
            ));
        }
    }
    let defaults = TOKENS.iter().filter(|name| !config.tokens.contains_key(**name));
    for (name, token) in defaults.filter_map(|name| Some((name, config.class.default_token(name)?))) {
        if !is_special(token) {
            problems.push(format!(
                "`{name}` is absent, for which the `tokenizer_class` has {token:?}, and that is not a special token of \
                 tokenizer.json; name one, or write TokenizersBackend"
            ));
        }
    }
    for said in &config.added {
        let Some(known) = added.get(&said.id).filter(|known| known.content == said.content) else {
            // Tokens that were not really added are in the vocabulary.
            if said.key == "added_tokens.json" && tokenizer.token_to_id(&said.content) == Some(said.id) {
                continue;
            }
            problems.push(format!(
                "`{}`: the `content` of {} is {:?}, and in tokenizer.json it is not; save the tokenizer again",
                said.key, said.id, said.content
            ));
            continue;
        };
        let flags = [
            ("special", known.special, false),
            ("lstrip", known.lstrip, false),
            ("rstrip", known.rstrip, false),
            ("single_word", known.single_word, false),
            // By default the opposite of `special`.
            ("normalized", known.normalized, !said.flags.get("special").copied().unwrap_or(false)),
        ];
        if said.key == "added_tokens.json" {
            continue;
        }
        for (flag, known, default) in flags {
            if said.flags.get(flag).copied().unwrap_or(default) != known {
                problems.push(format!(
                    "`{}`: `{flag}` of {:?} is {}, and {known} in tokenizer.json; save the tokenizer again",
                    said.key, said.content, !known
                ));
            }
        }
    }
    // Rows are computed without it, but the library does not go without.
    if config.token("pad_token").is_none() {
        problems.push(
            "`pad_token` is missing, without which sentence-transformers does not compute several texts at once; name one"
                .to_owned(),
        );
    }
}

/// What a class makes of the keys, against what tokenizer.json has.
fn check_class(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    use TokenizerClass::{Backend, Bert, Gemma, Llama, MpNet, Qwen2, Roberta, XlmRoberta};
    let normalizer = written(tokenizer.get_normalizer());
    let pre_tokenizer = written(tokenizer.get_pre_tokenizer());
    let model = written(Some(tokenizer.get_model()));
    let kind = |part: &Value| part["type"].as_str().unwrap_or_default().to_owned();
    let wanted = match config.class {
        Backend => return,
        Bert | MpNet => "WordPiece",
        Roberta | Llama | Qwen2 | Gemma => "BPE",
        XlmRoberta => "Unigram",
    };
    // Llama 3's is of bytes, and then transformers takes tokenizer.json as it is.
    if config.class == Llama && all_kinds(&pre_tokenizer).iter().any(|kind| kind == "ByteLevel") {
        return;
    }
    let parts = [all_kinds(&normalizer), all_kinds(&pre_tokenizer)].concat();
    let has = |kind: &str| parts.iter().any(|known| known == kind);
    let fits = kind(&model) == wanted
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
            "`tokenizer_class` is another kind of tokenizer than tokenizer.json ({} of {}): write TokenizersBackend if \
             tokenizer.json is right",
            kind(&model),
            parts.join(", ")
        ));
        return;
    }
    if matches!(config.class, Bert | MpNet) {
        check_words(&normalizer, config.words, problems);
    }
    // Pieces by their chances have the number of the token, others its text.
    let number = model["unk_id"].as_u64().and_then(|id| u32::try_from(id).ok());
    let of_number = number.and_then(|id| tokenizer.id_to_token(id));
    let unknown = model["unk_token"].as_str().or(of_number.as_deref());
    if let (Some(known), Some(given)) = (unknown, config.token("unk_token"))
        && known != given
    {
        problems.push(format!("`unk_token` is {given:?}, and {known:?} in tokenizer.json"));
    }
    check_prefix(&normalizer, &pre_tokenizer, config, problems);
    check_surroundings(tokenizer, config, problems);
}

/// The kinds of a part and of the parts that it is a sequence of.
fn all_kinds(part: &Value) -> Vec<String> {
    let own = part["type"].as_str().filter(|kind| *kind != "Sequence").map(str::to_owned);
    let inner = ["normalizers", "pretokenizers"].iter().filter_map(|key| part[*key].as_array()).flatten();
    own.into_iter().chain(inner.flat_map(all_kinds)).collect()
}

fn check_words(normalizer: &Value, words: Words, problems: &mut Vec<String>) {
    let Words { lower_case, strip_accents, chinese } = words;
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
                "`{key}` is {given} (or what the class takes for it), and tokenizer.json does the opposite; write the one \
                 that the model was trained with to both"
            ));
        }
    }
}

/// Whether a space is put before a text.
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
            let scheme_says = match &scheme {
                Some(scheme) if *scheme == "never" => None,
                Some(scheme) => Some(*scheme == "always"),
                None => prepends.then_some(true),
            };
            if config.class == Llama && scheme_says.is_some_and(|everywhere| everywhere != legacy) {
                problems.push(format!(
                    "`legacy` is {legacy} (or absent), by which the `tokenizer_class` puts a space before {}, and tokenizer.json \
                     does the opposite; write the one that the model was trained with",
                    if legacy { "what stands behind a special token, too" } else { "the beginning of a text alone" }
                ));
            }
            let known = scheme.map(|scheme| scheme != "never");
            (config.add_prefix_space.unwrap_or(true), known.or(prepends.then_some(true)))
        }
        _ => return,
    };
    if known.is_some_and(|known| known != given) {
        problems.push(format!("`add_prefix_space` is {given}, and tokenizer.json does the opposite"));
    }
}

/// The ids around a text, of the tokenizer's own steps.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let text = tokenizer.encode_fast("a", false).ok()?.get_ids().to_vec();
    let whole = tokenizer.encode_fast("a", true).ok()?.get_ids().to_vec();
    let start = whole.windows(text.len().max(1)).position(|ids| ids == text)?;
    Some((whole[..start].to_vec(), whole[start + text.len()..].to_vec()))
}

/// Special tokens around a text, of classes that put them there themselves.
fn check_surroundings(tokenizer: &Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    use TokenizerClass::{Bert, MpNet, Roberta, XlmRoberta};
    let names = match config.class {
        Bert | MpNet | Roberta => ["cls_token", "sep_token"],
        XlmRoberta => ["bos_token", "eos_token"],
        _ => return,
    };
    let Some((before, behind)) = around(tokenizer) else { return };
    for (name, ids) in names.into_iter().zip([before, behind]) {
        // A class falls back to the ids of its own vocabulary where the file says that there is none.
        let token = config.token(name).or_else(|| config.class.default_token(name));
        let id = token.and_then(|token| tokenizer.token_to_id(token));
        if ids.as_slice() != id.as_slice() {
            problems.push(format!(
                "`{name}` of this `tokenizer_class` is {:?}, and tokenizer.json puts other tokens around a text ({ids:?})",
                token.unwrap_or("absent")
            ));
        }
    }
}

/// Whether the beginning and the end of a text are marked, as the files say.
fn check_ends(tokenizer: &mut Tokenizer, config: &TokenizerConfig, problems: &mut Vec<String>) {
    let Some((before, behind)) = around(tokenizer) else { return };
    let id = |name: &str| config.token(name).and_then(|token| tokenizer.token_to_id(token));
    let has_bos = id("bos_token").is_some_and(|id| before.contains(&id));
    let has_eos = id("eos_token").is_some_and(|id| behind.contains(&id));
    // gte-Qwen2's own class does it, and that is the code that the model was trained with.
    if config.appends_in_code && config.add_eos == Some(true) && !has_eos {
        match (config.token("eos_token"), id("eos_token")) {
            (Some(token), Some(id)) => match appending(token, id) {
                Ok(template) => {
                    tokenizer.with_post_processor(Some(template));
                }
                Err(problem) => problems.push(problem),
            },
            _ => problems.push("`add_eos_token` is true, and there is no `eos_token`".to_owned()),
        }
        return;
    }
    for (key, given, known) in
        [("add_bos_token", config.add_bos, has_bos), ("add_eos_token", config.add_eos, has_eos)]
    {
        if given.is_some_and(|given| given != known) {
            problems.push(format!(
                "`{key}` is {}, and tokenizer.json does the opposite: versions of transformers take the one or the other; \
                 save the tokenizer again, with the post-processor that the model was trained with",
                !known
            ));
        }
    }
}

/// A text with this token behind it.
fn appending(token: &str, id: u32) -> Result<PostProcessorWrapper, String> {
    let template = TemplateProcessing::builder()
        .try_single(format!("$A:0 {token}:0"))
        .and_then(|builder| builder.try_pair(format!("$A:0 {token}:0 $B:1 {token}:1")))?
        .special_tokens(vec![(token, id)])
        .build()
        .map_err(|error| error.to_string())?;
    Ok(PostProcessorWrapper::Template(template))
}

/// Texts go into lower case before anything else, but for the names of special tokens; a tokenizer that does so itself
/// is left as it is.
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
