//! Chat template of an LLM reranker: formats a query and a document as the text that the model reads.
//!
//! A template is a Jinja program that comes with the model. Its input are messages with the roles `system` (the
//! instruction, if the model has one), `query` and `document`; its output is tokenized as it is, including special
//! tokens by name. The environment is that of transformers: blocks remove their line end and indentation, loops have
//! `break` and `continue`, and there are the special tokens of tokenizer_config.json, `raise_exception`, and Python's
//! JSON.
//!
//! A template for chats ignores these roles, so that the model would score a text without the pair. Whether query and
//! document appear in the output is tested when the model is loaded ([`PairTemplate::read`]), by rendering, as
//! sentence-transformers does; it cannot be derived from the source.
//!
//! As in sentence-transformers, a text may contain the names of special tokens: a document that contains `<|im_end|>`
//! ends its own message, and the text after it acts as a prompt. It can raise its own score.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};
use serde_json::ser::Formatter;
use serde_json::{Map, Serializer, Value as Json};

use super::sentence::transformer;
use super::{LabelHead, ModelError, optional_json};

/// Limit of a rendering's cost: one unit for each instruction and for each 64 bytes written or compared. The template
/// of a pair takes some hundreds of instructions; scanning the largest request body (32 MiB) five times takes 2.6
/// million. An endless loop ends in less than a second.
const FUEL: u64 = 4_000_000;
/// File of the template, also its name in Jinja. If it does not exist, the template is in [`TOKENIZER`].
const FILE: &str = "chat_template.jinja";
const TOKENIZER: &str = "tokenizer_config.json";
/// Name of the template that is used if there are several.
const DEFAULT: &str = "default";

/// Template that formats a query and a document as one text.
#[derive(Clone, Debug)]
pub struct PairTemplate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    environment: Environment<'static>,
    /// Whether the content of a message is a list of typed parts.
    structured: bool,
    /// Instruction before each pair.
    system: Option<String>,
}

#[derive(Default, Deserialize)]
struct RawSentence {
    modality_config: Option<Map<String, Json>>,
    #[serde(default)]
    processing_kwargs: RawProcessing,
    #[serde(default)]
    do_lower_case: bool,
}

/// Arguments that sentence-transformers passes with each call.
#[derive(Default, Deserialize)]
struct RawProcessing {
    #[serde(default)]
    chat_template: Map<String, Json>,
    #[serde(default)]
    text: Map<String, Json>,
    #[serde(default)]
    common: Map<String, Json>,
}

/// Source of a template, and the file that contains it.
struct Source {
    path: PathBuf,
    text: String,
    /// Whether it is one of several named templates; sentence-transformers' detection of the content format ignores
    /// those.
    named: bool,
}

/// Rejects a chat template beside a reranker with a classification head. Such pairs are joined by special tokens here,
/// but sentence-transformers would format them with the template.
pub(super) fn refuse_for_labels(folder: &Path, head: Option<&LabelHead>) -> Result<(), ModelError> {
    if head.is_none_or(|head| head.labels.len() > 1) {
        return Ok(());
    }
    let path = folder.join(TOKENIZER);
    let tokenizer: Map<String, Json> = optional_json(&path)?.unwrap_or_default();
    let exists = tokenizer.get("chat_template").is_some_and(|template| !template.is_null());
    if !exists && !folder.join(FILE).exists() {
        return Ok(());
    }
    let problem = format!(
        "`chat_template` (or {FILE}) exists beside a reranker with a classification head; sentence-transformers would \
         format each pair with it, which is not supported; remove the template if the model was trained on plain pairs"
    );
    Err(ModelError::Content { path, problem })
}

/// Returns whether the chat template renders a query and a document, as those of rerankers do and those of chats do
/// not.
pub(super) fn is_reranker_template(folder: &Path) -> bool {
    PairTemplate::read(folder, false, None).is_ok()
}

impl PairTemplate {
    /// Reads the template of the model in this folder, with the instruction `system`. `listed` states whether
    /// modules.json exists: then the files beside it configure the message format, and require a template.
    pub(super) fn read(
        folder: &Path,
        listed: bool,
        system: Option<&str>,
    ) -> Result<PairTemplate, ModelError> {
        // Without modules.json the library does not read the file.
        let raw = match transformer::find(folder)?.filter(|_| listed) {
            None => RawSentence::default(),
            Some((path, raw)) => serde_json::from_value(Json::Object(raw))
                .map_err(|error| ModelError::Content { path, problem: error.to_string() })?,
        };
        let at_folder = |problem: String| ModelError::Content { path: folder.to_owned(), problem };
        let format = raw.format(listed).map_err(at_folder)?;
        let variables = raw.variables().map_err(at_folder)?;
        let tokenizer: Map<String, Json> = optional_json(&folder.join(TOKENIZER))?.unwrap_or_default();
        let Source { path, text, named } = source(folder, &tokenizer)?;
        let structured = match format {
            Some(structured) => structured,
            None => named || in_parts(&text),
        };
        let system = system.filter(|system| !system.is_empty()).map(str::to_owned);
        let refuse = |problem: String| ModelError::Content { path: path.clone(), problem };
        let environment =
            environment(&text, &tokenizer, variables).map_err(|error| refuse(error_message(&error)))?;
        let template = PairTemplate(Arc::new(Inner { environment, structured, system }));
        template.try_out().map_err(refuse)?;
        // The template prints a list where it expects a text.
        let writes_parts = || template.render("a", "b").is_ok_and(|text| text.contains("[{"));
        if structured && !text.contains("tojson") && writes_parts() {
            return Err(refuse(
                "`modality_config` has the `format` structured, but the template expects the content as text; set flat"
                    .to_owned(),
            ));
        }
        Ok(template)
    }

    /// Renders a pair; an error is the message of the template.
    pub fn render(&self, query: &str, document: &str) -> Result<String, String> {
        let Inner { environment, structured, system } = &*self.0;
        let content = |text: &str| {
            if *structured { Value::from(vec![context! { type => "text", text }]) } else { Value::from(text) }
        };
        let message = |role: &str, text: &str| context! { role, content => content(text) };
        let task = system.iter().map(|system| message("system", system));
        let messages: Vec<Value> =
            task.chain([message("query", query), message("document", document)]).collect();
        let rendered =
            environment.get_template(FILE).and_then(|template| template.render(context! { messages }));
        rendered.map_err(|error| error_message(&error))
    }

    /// Returns the byte ranges of query and document in the rendered text; they do not overlap.
    pub fn places(&self, query: &str, document: &str, rendered: &str) -> Result<[Range<usize>; 2], String> {
        // The range that changes when a text is replaced is its position. The two replacements begin and end with
        // different characters, so that at least one of them differs from the text at each end.
        const OTHERS: [&str; 2] = ["0", "1 2"];
        let range_of = |renders: [Result<String, String>; 2]| -> Result<Range<usize>, String> {
            let (mut start, mut end) = (rendered.len(), rendered.len());
            for other in renders {
                let other = in_common(rendered, &other?);
                (start, end) = (start.min(other.0), end.min(other.1));
            }
            Ok(start..(rendered.len() - end).max(start))
        };
        let of_query = range_of(OTHERS.map(|other| self.render(other, document)))?;
        let of_document = range_of(OTHERS.map(|other| self.render(query, other)))?;
        if of_query.start < of_document.end && of_document.start < of_query.end {
            // The template writes a text more than once: the whole range is treated as one text.
            let all = of_query.start.min(of_document.start)..of_query.end.max(of_document.end);
            return Ok([all.start..all.start, all]);
        }
        Ok([of_query, of_document])
    }

    /// Checks that the rendered text depends on both texts.
    fn try_out(&self) -> Result<(), String> {
        let render = |query: &str, document: &str| {
            self.render(query, document)
                .map_err(|error| format!("the template fails on a pair of texts: {error}"))
        };
        let base = render("alpha", "bravo")?;
        let mut dropped = Vec::new();
        for (role, query, document) in [("query", "charlie", "bravo"), ("document", "alpha", "foxtrot")] {
            if render(query, document)? == base {
                dropped.push(role);
            }
        }
        if dropped.is_empty() {
            return Ok(());
        }
        Err(format!(
            "the template drops the {}: each is a message with that role, and the template must render it; use a \
             revision of the model whose template does, or write one to {FILE}",
            dropped.join(" and the ")
        ))
    }
}

impl RawSentence {
    /// Returns whether contents are lists of typed parts, if configured.
    fn format(&self, listed: bool) -> Result<Option<bool>, String> {
        if self.do_lower_case {
            return Err("`do_lower_case` = true is not supported with a chat template".to_owned());
        }
        let message = self.modality_config.as_ref().and_then(|modalities| modalities.get("message"));
        if message.is_none() && (listed || self.modality_config.is_some()) {
            return Err("`modality_config` has no `message`: an LLM reranker without a chat template is not supported; \
                        add a template and save the model again, with \
                        `CrossEncoder(…).save_pretrained(…)` of sentence-transformers 6"
                .to_owned());
        }
        let format = message.and_then(|message| message.get("format"));
        match format.map(|format| format.as_str().unwrap_or("no text")) {
            None | Some("auto") => Ok(None),
            Some("flat") => Ok(Some(false)),
            Some("structured") => Ok(Some(true)),
            Some(other) => Err(format!(
                "`format` = {other} of `message` is not supported; structured, flat and auto are"
            )),
        }
    }

    /// Returns the variables of the template.
    fn variables(self) -> Result<Map<String, Json>, String> {
        let RawProcessing { chat_template: mut variables, text, common } = self.processing_kwargs;
        // These keys have effects beyond the template.
        let others =
            ["chat_template", "continue_final_message", "max_length", "truncation", "tools", "documents"];
        if let Some(key) = others.iter().find(|key| variables.contains_key(**key)) {
            return Err(format!("`processing_kwargs` has `chat_template.{key}`, which is not supported"));
        }
        // These keys do not change the result of a single sequence.
        let without_effect = ["padding", "logits_to_keep"];
        if let Some(key) =
            text.keys().chain(common.keys()).find(|key| !without_effect.contains(&key.as_str()))
        {
            return Err(format!(
                "`processing_kwargs` has `{key}` for texts, which is not supported; `model_max_length` of {TOKENIZER} \
                 limits their length"
            ));
        }
        // The end of the template is kept in any case.
        for key in ["restore_suffix", "padding", "return_tensors"] {
            variables.remove(key);
        }
        Ok(variables)
    }
}

fn source(folder: &Path, tokenizer: &Map<String, Json>) -> Result<Source, ModelError> {
    #[derive(Deserialize)]
    struct NamedTemplate {
        name: String,
        template: String,
    }
    let path = folder.join(FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => return Ok(Source { path, text, named: false }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(reason) => return Err(ModelError::Read { path, reason }),
    }
    let path = folder.join(TOKENIZER);
    let refuse = |problem: String| ModelError::Content { path: path.clone(), problem };
    let given = match tokenizer.get("chat_template") {
        None | Some(Json::Null) => {
            return Err(refuse(format!(
                "there is no chat template, which an LLM reranker needs to format pairs: `chat_template` is not set \
                 here, and {FILE} does not exist; add one that renders the messages with the roles query and document"
            )));
        }
        Some(Json::String(text)) => {
            return Ok(Source { text: text.clone(), path, named: false });
        }
        Some(given) => given,
    };
    let named: Vec<NamedTemplate> = serde_json::from_value(given.clone()).map_err(|_| {
        refuse("`chat_template` is neither a template nor a list of named templates".to_owned())
    })?;
    let names: Vec<String> = named.iter().map(|template| template.name.clone()).collect();
    match named.into_iter().find(|template| template.name == DEFAULT) {
        Some(NamedTemplate { template: text, .. }) => Ok(Source { path, text, named: true }),
        None => Err(refuse(format!(
            "`chat_template` has {}, but none is called {DEFAULT}, which is the one that is used",
            names.join(", ")
        ))),
    }
}

/// Returns whether a template expects typed parts, detected by substrings as in sentence-transformers.
fn in_parts(source: &str) -> bool {
    // `message.content[0]` and `item.type` contain these as well.
    ["content[0]", ".type", "'type'", "\"type\"", "message.content["].iter().any(|sign| source.contains(sign))
}

/// Returns the environment that transformers gives a template.
fn environment(
    source: &str,
    tokenizer: &Map<String, Json>,
    variables: Map<String, Json>,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    for (name, token) in tokenizer.iter().filter(|(name, _)| name.ends_with("_token")) {
        if let Some(token) = token.as_str().or_else(|| token.get("content")?.as_str()) {
            environment.add_global(name.clone(), token);
        }
    }
    for name in ["tools", "documents"] {
        environment.add_global(name, ());
    }
    environment.add_global("add_generation_prompt", false);
    for (name, value) in variables {
        environment.add_global(name, Value::from(Serde(value)));
    }
    // Python's Jinja normalizes line ends.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(FILE, source)?;
    Ok(environment)
}

/// Serializes JSON as Python does: with a space after commas and colons, and without escaping characters.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    struct Spaced;
    impl Formatter for Spaced {
        fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
            if first { Ok(()) } else { out.write_all(b", ") }
        }

        fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
            self.begin_array_value(out, first)
        }

        fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
            out.write_all(b": ")
        }
    }
    // Options such as indentation are rejected.
    options.assert_all_used()?;
    let mut text = Vec::new();
    let broken = |error: String| Error::new(ErrorKind::BadSerialization, error);
    value
        .serialize(&mut Serializer::with_formatter(&mut text, Spaced))
        .map_err(|error| broken(error.to_string()))?;
    String::from_utf8(text).map_err(|error| broken(error.to_string()))
}

/// Returns the lengths in bytes of the common prefix and the common suffix of two texts.
fn in_common(a: &str, b: &str) -> (usize, usize) {
    let same = |(a, b): &(u8, u8)| a == b;
    let before = a.bytes().zip(b.bytes()).take_while(same).count();
    let after = a.bytes().rev().zip(b.bytes().rev()).take_while(same).count();
    (before, after)
}

/// Returns the message of the engine or the template, with the line.
fn error_message(error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("it takes more than {FUEL} steps");
    }
    let line = error.line().map(|line| format!(", line {line} of the template")).unwrap_or_default();
    let detail = error.detail().map(str::to_owned).unwrap_or_else(|| error.kind().to_string());
    format!("{detail}{line}")
}

#[cfg(test)]
mod tests;
