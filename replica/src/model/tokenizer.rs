//! `tokenizer_config.json`: settings of the tokenizer's Python class, which extend or replace parts of
//! `tokenizer.json`.
//!
//! `tokenizer.json` defines the tokenization. Beside it are the arguments of the tokenizer's Python class; version 5 of
//! transformers rebuilds several steps from them, version 4 some others. If both files agree, all versions produce the
//! same tokens; if they contradict each other, the checkpoint is rejected with the key. This module reads the keys;
//! `tokenize::settings` compares them with the tokenizer.
//!
//! The files `special_tokens_map.json` and `added_tokens.json` of older versions are read as well, as the library does
//! if `added_tokens_decoder` is absent.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::fields::{Inert, JsonFields, Kind, shown};
use super::{ModelError, optional_json};

/// Settings of the tokenizer from the files beside `tokenizer.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerConfig {
    /// Whether the file exists; without it there is nothing to compare.
    pub(crate) exists: bool,
    /// Maximum tokens of a text, special ones included.
    pub(crate) max_tokens: Option<usize>,
    /// Class of the tokenizer.
    pub(crate) class: TokenizerClass,
    /// Special tokens by name, such as `cls_token`; null if the file states that there is none.
    pub(crate) tokens: BTreeMap<String, Option<String>>,
    /// Other tokens that must be special ones, with the key that lists them.
    pub(crate) others: Vec<(String, String)>,
    /// Tokens that were added to the vocabulary.
    pub(crate) added: Vec<AddedToken>,
    /// Whether `bos_token` precedes a text, if stated.
    pub(crate) add_bos: Option<bool>,
    /// Whether `eos_token` follows a text, if stated.
    pub(crate) add_eos: Option<bool>,
    /// Whether the model's own tokenizer class appends `eos_token` if `tokenizer.json` does not.
    pub(crate) appends_in_code: bool,
    /// `do_lower_case`, `strip_accents` and `tokenize_chinese_chars`, for classes that split words like BERT's.
    pub(crate) words: WordOptions,
    /// Whether a space is put before a text, if stated.
    pub(crate) add_prefix_space: Option<bool>,
    /// Handling of pieces after a special token in Llama's class, if stated.
    pub(crate) legacy: Option<bool>,
    /// Whether the model gets token types, if stated.
    pub(crate) types: Option<bool>,
    /// Whether the class is DistilBERT's, which has no token types.
    pub(crate) is_distilled: bool,
}

/// Token that was added to the vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddedToken {
    /// Key that lists it.
    pub(crate) key: &'static str,
    /// Id.
    pub(crate) id: u32,
    /// Text.
    pub(crate) content: String,
    /// Flags of the token: `special`, `lstrip` and so on.
    pub(crate) flags: BTreeMap<String, bool>,
}

/// Options of BERT's class for splitting texts into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordOptions {
    pub(crate) lower_case: bool,
    /// Absent = the same as `lower_case`.
    pub(crate) strip_accents: Option<bool>,
    pub(crate) chinese: bool,
}

impl Default for WordOptions {
    /// Defaults of the class.
    fn default() -> WordOptions {
        WordOptions { lower_case: true, strip_accents: None, chinese: true }
    }
}

/// Tokenizer class, without the suffix `Fast`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TokenizerClass {
    /// Uses `tokenizer.json` as it is.
    #[default]
    Backend,
    /// BERT and DistilBERT.
    Bert,
    /// MPNet, which splits words like BERT.
    MpNet,
    /// RoBERTa.
    Roberta,
    /// XLM-RoBERTa and CamemBERT.
    XlmRoberta,
    /// Llama.
    Llama,
    /// Qwen2 and Qwen3.
    Qwen2,
    /// Gemma.
    Gemma,
}

const CLASSES: &[(&str, TokenizerClass)] = &[
    ("TokenizersBackend", TokenizerClass::Backend),
    ("PreTrainedTokenizer", TokenizerClass::Backend),
    ("BertTokenizer", TokenizerClass::Bert),
    ("DistilBertTokenizer", TokenizerClass::Bert),
    ("ElectraTokenizer", TokenizerClass::Bert),
    ("MPNetTokenizer", TokenizerClass::MpNet),
    ("RobertaTokenizer", TokenizerClass::Roberta),
    ("XLMRobertaTokenizer", TokenizerClass::XlmRoberta),
    ("CamembertTokenizer", TokenizerClass::XlmRoberta),
    ("LlamaTokenizer", TokenizerClass::Llama),
    ("Qwen2Tokenizer", TokenizerClass::Qwen2),
    ("GemmaTokenizer", TokenizerClass::Gemma),
];

impl TokenizerClass {
    /// Returns the class that transformers uses for a family if the files name none.
    fn of_family(family: &str) -> TokenizerClass {
        match family {
            "bert" | "distilbert" | "nomic_bert" | "electra" => TokenizerClass::Bert,
            "mpnet" => TokenizerClass::MpNet,
            "roberta" => TokenizerClass::Roberta,
            "xlm-roberta" | "camembert" => TokenizerClass::XlmRoberta,
            "qwen2" | "qwen3" => TokenizerClass::Qwen2,
            "gemma2" | "gemma3_text" => TokenizerClass::Gemma,
            _ => TokenizerClass::Backend,
        }
    }

    /// Returns the class's default for this special token.
    pub(crate) fn default_token(self, name: &str) -> Option<&'static str> {
        use TokenizerClass::{Backend, Bert, Gemma, Llama, MpNet, Qwen2, Roberta, XlmRoberta};
        match (self, name) {
            (Backend, _) => None,
            (Bert, "cls_token") => Some("[CLS]"),
            (Bert, "sep_token") => Some("[SEP]"),
            (Bert, "pad_token") => Some("[PAD]"),
            (Bert, "mask_token") => Some("[MASK]"),
            (Bert | MpNet, "unk_token") => Some("[UNK]"),
            (MpNet | Roberta | XlmRoberta, "bos_token" | "cls_token") => Some("<s>"),
            (MpNet | Roberta | XlmRoberta, "eos_token" | "sep_token") => Some("</s>"),
            (MpNet | Roberta | XlmRoberta, "pad_token") => Some("<pad>"),
            (MpNet | Roberta | XlmRoberta, "mask_token") => Some("<mask>"),
            (Roberta | XlmRoberta | Llama | Gemma, "unk_token") => Some("<unk>"),
            (Llama, "bos_token") => Some("<s>"),
            (Llama, "eos_token") => Some("</s>"),
            (Gemma, "bos_token") => Some("<bos>"),
            (Gemma, "eos_token") => Some("<eos>"),
            (Gemma, "pad_token") => Some("<pad>"),
            (Gemma, "mask_token") => Some("<mask>"),
            (Qwen2, "unk_token" | "eos_token" | "pad_token") => Some("<|endoftext|>"),
            _ => None,
        }
    }
}

/// Names of the special tokens that every class has.
pub(crate) const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Tokenizer class of gte-Qwen2, which appends the end-of-text token regardless of tokenizer.json.
const GTE_QWEN: [&str; 2] = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"];

impl TokenizerConfig {
    /// Name of the file; it takes precedence over the older ones.
    pub(crate) const FILE: &str = "tokenizer_config.json";

    /// Reads the files of a model of this family; `class` is the tokenizer class in config.json, if any.
    pub(crate) fn read(
        folder: &Path,
        family: &str,
        class: Option<&str>,
    ) -> Result<TokenizerConfig, ModelError> {
        let path = folder.join(TokenizerConfig::FILE);
        let Some(mut raw) = optional_json::<Map<String, Value>>(&path)? else {
            return Ok(TokenizerConfig::default());
        };
        let mut added = Vec::new();
        if !raw.contains_key("added_tokens_decoder") {
            let older = optional_json::<Map<String, Value>>(&folder.join("special_tokens_map.json"))?;
            raw.extend(older.unwrap_or_default());
            let older = optional_json::<BTreeMap<String, u32>>(&folder.join("added_tokens.json"))?;
            added.extend(older.into_iter().flatten().map(|(content, id)| AddedToken {
                key: "added_tokens.json",
                id,
                content,
                flags: BTreeMap::new(),
            }));
        }
        let mut config = parse(&raw, family, class)
            .map_err(|problems| ModelError::Content { path, problem: problems.join("; ") })?;
        config.added.extend(added);
        Ok(config)
    }

    /// Returns whether the model gets token types.
    pub(crate) fn uses_token_types(&self) -> bool {
        !self.exists || self.types.unwrap_or(self.class == TokenizerClass::Bert && !self.is_distilled)
    }

    /// Returns the special token with this name: from the file, or the default of the class.
    pub(crate) fn token(&self, name: &str) -> Option<&str> {
        match self.tokens.get(name) {
            Some(given) => given.as_deref(),
            None => self.class.default_token(name),
        }
    }
}

fn parse(
    raw: &Map<String, Value>,
    family: &str,
    class_in_config: Option<&str>,
) -> Result<TokenizerConfig, Vec<String>> {
    let mut fields = JsonFields::new(raw);
    ignore(&mut fields);
    let appends_in_code = auto_map(&mut fields, family);
    let class = class(&mut fields, family, class_in_config);
    let mut config = TokenizerConfig {
        exists: true,
        max_tokens: max_tokens(&mut fields),
        class,
        add_bos: optional_flag(&mut fields, "add_bos_token"),
        add_eos: optional_flag(&mut fields, "add_eos_token"),
        appends_in_code,
        words: WordOptions {
            lower_case: fields.flag("do_lower_case", true),
            strip_accents: optional_flag(&mut fields, "strip_accents"),
            chinese: fields.flag("tokenize_chinese_chars", true),
        },
        add_prefix_space: optional_flag(&mut fields, "add_prefix_space"),
        legacy: optional_flag(&mut fields, "legacy"),
        types: types(&mut fields),
        is_distilled: raw
            .get("tokenizer_class")
            .and_then(Value::as_str)
            .is_some_and(|class| class.starts_with("DistilBert")),
        ..TokenizerConfig::default()
    };
    tokens(&mut fields, raw, &mut config);
    if class == TokenizerClass::Roberta && fields.is_null("add_prefix_space") {
        fields.problem("`add_prefix_space` is null; set true or false".to_owned());
    }
    // These classes insert the token's text into their steps, which would be "None".
    if matches!(
        class,
        TokenizerClass::Bert | TokenizerClass::MpNet | TokenizerClass::Roberta | TokenizerClass::XlmRoberta
    ) {
        for name in TOKENS {
            if config.tokens.get(name) == Some(&None) && class.default_token(name).is_some() {
                fields.problem(format!("`{name}` is null, but this `tokenizer_class` needs one; set it"));
            }
        }
    }
    for key in ["padding_side", "truncation_side"] {
        let side = fields.word(key).unwrap_or("right");
        // Rows are computed without padding, so the library's padding side has no effect.
        if side != "right" && (side != "left" || key == "truncation_side") {
            fields.problem(format!(
                "`{key}` = {side} is not supported; right is (a request may select another truncation side)"
            ));
        }
    }
    fields.must_be(
        "split_special_tokens",
        false,
        "names of special tokens in a text would be split into pieces",
    );
    fields.refuse_others();
    fields.finish(config)
}

/// Ignores the keys without effect on the tokens of a text, with the reason.
fn ignore(fields: &mut JsonFields<'_>) {
    fields.ignore(&[
        // Origin of the files, and software that reads them.
        Inert(
            Kind::Any,
            &[
                "name_or_path",
                "backend",
                "is_local",
                "local_files_only",
                "is_fast",
                "use_fast",
                "from_slow",
                "processor_class",
                "special_tokens_map_file",
                "tokenizer_file",
                "vocab_file",
                "merges_file",
                "verbose",
                "device_map",
                "trust_remote_code",
            ],
        ),
        // Decoding of tokens to text.
        Inert(
            Kind::Any,
            &["clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors", "response_schema"],
        ),
        Inert(Kind::Flag, &["trim_offsets"]),
        // Settings of slow classes, which tokenizer.json replaces.
        Inert(
            Kind::Any,
            &[
                "do_basic_tokenize",
                "never_split",
                "sp_model_kwargs",
                "keep_accents",
                "remove_space",
                "normalize",
            ],
        ),
        Inert(Kind::Any, &["do_lowercase", "lowercase", "subword_prefix"]),
        // Arguments of a former call; each request has its own.
        Inert(
            Kind::Any,
            &[
                "max_length",
                "stride",
                "truncation_strategy",
                "truncation",
                "padding",
                "pad_to_multiple_of",
                "pad_token_type_id",
                "return_token_type_ids",
            ],
        ),
        // Chat templates. For LLM rerankers the template is read separately.
        Inert(
            Kind::Any,
            &["chat_template", "use_default_system_prompt", "chat_control_tokens", "response_template"],
        ),
        // Correction of the word splitting of some tokenizers with large vocabularies, which is part of tokenizer.json
        // or not.
        Inert(Kind::Any, &["fix_mistral_regex"]),
    ]);
}

fn optional_flag(fields: &mut JsonFields<'_>, key: &str) -> Option<bool> {
    fields.optional(key)?;
    Some(fields.flag(key, false))
}

/// Returns the class, and rejects an unknown one.
fn class(fields: &mut JsonFields<'_>, family: &str, in_config: Option<&str>) -> TokenizerClass {
    fields.optional("tokenizer_class");
    let given = fields.word("tokenizer_class");
    let Some(name) = given.or(in_config) else { return TokenizerClass::of_family(family) };
    let known = CLASSES.iter().find(|(known, _)| name.strip_suffix("Fast").unwrap_or(name) == *known);
    if let (None, Some(name)) = (known, given) {
        let known: Vec<&str> = CLASSES.iter().map(|(known, _)| *known).collect();
        fields.problem(format!("`tokenizer_class` = {name} is not supported; {} are", known.join(", ")));
    }
    match family {
        // transformers uses tokenizer.json as it is for these families.
        "mistral" | "modernbert" => TokenizerClass::Backend,
        _ => known.map_or(TokenizerClass::Backend, |(_, class)| *class),
    }
}

/// Returns whether the model's own code is that of gte-Qwen2; other code is rejected.
fn auto_map(fields: &mut JsonFields<'_>, family: &str) -> bool {
    let Some(given) = fields.optional("auto_map") else { return false };
    let references: Vec<&Value> = match given {
        Value::Object(map) => map
            .values()
            .flat_map(|value| value.as_array().map_or(vec![value], |all| all.iter().collect()))
            .collect(),
        Value::Array(all) => all.iter().collect(),
        other => vec![other],
    };
    let local = |reference: &str| {
        reference.rsplit_once("--").map_or(reference.to_owned(), |(_, local)| local.to_owned())
    };
    let is_known = |reference: &&Value| {
        reference.is_null()
            || reference.as_str().is_some_and(|reference| GTE_QWEN.contains(&local(reference).as_str()))
    };
    if let Some(unknown) = references.iter().find(|reference| !is_known(reference)) {
        fields.problem(format!(
            "`auto_map` names {}, which is code that comes with the model; it is not executed, and its effect on \
             texts is unknown; use a model whose tokenizer class is part of transformers",
            shown(unknown)
        ));
        return false;
    }
    if family != "qwen2" && !references.is_empty() {
        fields.problem(format!(
            "`auto_map` = {} is the code of a Qwen2, but `model_type` is {family}",
            shown(given)
        ));
    }
    !references.is_empty()
}

/// Version 5 of transformers also reads the older name.
fn max_tokens(fields: &mut JsonFields<'_>) -> Option<usize> {
    fields.optional("max_len");
    let key = fields.either(["model_max_length", "max_len"]);
    let given = fields.optional(key)?;
    match given.as_f64() {
        // "No limit" is written as 10³⁰.
        Some(length) if length >= 1.0 => Some(length as usize),
        Some(_) | None => {
            fields.problem(format!("`{key}` = {} is not above 0", shown(given)));
            None
        }
    }
}

/// Returns whether token types are among the model's inputs; the other inputs are fixed.
fn types(fields: &mut JsonFields<'_>) -> Option<bool> {
    let given = fields.get("model_input_names")?;
    let mut names: Vec<&str> = given.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let types = names.contains(&"token_type_ids");
    names.retain(|name| *name != "token_type_ids");
    if names != ["input_ids", "attention_mask"] {
        fields.problem(format!(
            "`model_input_names` = {} is not supported; input_ids, attention_mask and optionally token_type_ids are",
            shown(given)
        ));
    }
    Some(types)
}

/// Reads special tokens from all keys that list them.
fn tokens(fields: &mut JsonFields<'_>, raw: &Map<String, Value>, config: &mut TokenizerConfig) {
    let content =
        |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    for name in TOKENS {
        if !raw.contains_key(name) {
            continue;
        }
        let given = fields.optional(name);
        if let Some(given) = given.filter(|given| content(given).is_none()) {
            fields.problem(format!("`{name}` = {} is not a token", shown(given)));
        }
        config.tokens.insert(name.to_owned(), given.and_then(content));
    }
    for key in ["additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"] {
        let listed: Vec<&Value> = match fields.optional(key) {
            None => Vec::new(),
            Some(Value::Array(all)) => all.iter().collect(),
            Some(Value::Object(all)) => all.values().collect(),
            Some(other) => vec![other],
        };
        for token in listed {
            match content(token) {
                Some(token) => config.others.push((key.to_owned(), token)),
                None => fields.problem(format!("`{key}` has {}, which is not a token", shown(token))),
            }
        }
    }
    // Names defined by the model.
    for (key, value) in raw {
        if key.ends_with("_token") && !TOKENS.contains(&key.as_str()) && !key.starts_with("add_") {
            fields.optional(key);
            if let Some(token) = content(value) {
                config.others.push((key.clone(), token));
            }
        }
    }
    let Some(given) = fields.get("added_tokens_decoder") else { return };
    for (id, entry) in given.as_object().into_iter().flatten() {
        let (Ok(number), Some(content)) = (id.parse(), content(entry)) else {
            fields.problem(format!(
                "`added_tokens_decoder` has `{id}` = {}, which is not a token with its `content`",
                shown(entry)
            ));
            continue;
        };
        let mut flags = BTreeMap::new();
        for (name, value) in entry.as_object().into_iter().flatten() {
            match value.as_bool() {
                Some(flag) => drop(flags.insert(name.clone(), flag)),
                None if ["content", "id", "__type"].contains(&name.as_str()) => {}
                None => fields.problem(format!(
                    "`added_tokens_decoder` has `{name}` = {} for {content:?}, which is not true or false",
                    shown(value)
                )),
            }
        }
        config.added.push(AddedToken { key: "added_tokens_decoder", id: number, content, flags });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(raw: Value, family: &str) -> Result<TokenizerConfig, String> {
        parse(raw.as_object().unwrap(), family, None).map_err(|problems| problems.join("; "))
    }

    #[test]
    fn keys_that_decide_the_tokens_are_read() {
        let bert = check(
            json!({"tokenizer_class": "BertTokenizerFast", "do_lower_case": false, "model_max_length": 512,
                "cls_token": "[CLS]", "pad_token": {"content": "[PAD]", "__type": "AddedToken"}}),
            "bert",
        )
        .unwrap();
        assert_eq!(
            (bert.class, bert.words.lower_case, bert.max_tokens),
            (TokenizerClass::Bert, false, Some(512))
        );
        assert_eq!((bert.token("pad_token"), bert.token("sep_token")), (Some("[PAD]"), Some("[SEP]")));
        let none = check(json!({"model_max_length": 1e30, "eos_token": null}), "bert").unwrap();
        assert_eq!((none.class, none.token("eos_token")), (TokenizerClass::Bert, None));
        assert_eq!(check(json!({}), "mistral").unwrap().class, TokenizerClass::Backend);
        let gte = json!({"auto_map": {"AutoTokenizer": GTE_QWEN}, "add_eos_token": true});
        assert!(check(gte, "qwen2").unwrap().appends_in_code);
    }

    #[test]
    fn unknown_values_are_rejected_by_key() {
        for (raw, family, sentence) in [
            (json!({"made_up": 1}), "bert", "`made_up` = 1 is not understood"),
            (json!({"tokenizer_class": "MarianTokenizer"}), "bert", "`tokenizer_class` = MarianTokenizer"),
            (json!({"model_max_length": 0}), "bert", "`model_max_length` = 0 is not above 0"),
            (json!({"truncation_side": "left"}), "bert", "`truncation_side` = left is not supported"),
            (json!({"padding_side": "top"}), "bert", "`padding_side` = top is not supported"),
            (json!({"split_special_tokens": true}), "bert", "`split_special_tokens` = true is not supported"),
            (json!({"model_input_names": ["input_ids"]}), "bert", "`model_input_names` = [\"input_ids\"]"),
            (json!({"do_lower_case": null}), "bert", "`do_lower_case` is null"),
            (json!({"auto_map": {"AutoTokenizer": ["a.B", null]}}), "bert", "`auto_map` names \"a.B\""),
            (json!({"auto_map": {"AutoTokenizer": GTE_QWEN}}), "bert", "`auto_map` ="),
            (json!({"pad_token": 3}), "bert", "`pad_token` = 3 is not a token"),
        ] {
            let error = check(raw, family).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
