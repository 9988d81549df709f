//! The chat template of a model that judges pairs: a query and a document in, the text that the model reads out.
//!
//! A template is a program in Jinja that comes with the model. It is given messages of the roles `system` (the task, if
//! the model has one), `query` and `document`, and what it writes is tokenised as it stands, special tokens by their
//! names included. What surrounds it is what transformers gives it: blocks take their line and its indentation with
//! them, loops have `break` and `continue`, and there are the special tokens of tokenizer_config.json,
//! `raise_exception`, and Python's JSON.
//!
//! A template that was made for chats knows other roles and writes nothing for these, and the model would judge
//! a pair that it has not seen. So whether query and document come through is tried when the model is read
//! ([`PairTemplate::read`]), by rendering, as sentence-transformers does it: from the source it cannot be told.
//!
//! Nothing keeps a text from writing the names of special tokens, as in sentence-transformers: a document that contains
//! `<|im_end|>` ends itself, and what follows it speaks to the model in its own voice. It can raise its own score.

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

/// What rendering may cost: one for each instruction and one for 64 bytes that are written or looked at. A template for
/// a pair takes some hundreds of instructions, and to go five times over the largest body of a request (32 MiB) takes 2.6
/// million. A loop that never ends is over in less than a second.
const FUEL: u64 = 4_000_000;
/// The file, and what it is called to Jinja. Where it is not, the template is in [`TOKENIZER`].
const FILE: &str = "chat_template.jinja";
const TOKENIZER: &str = "tokenizer_config.json";
/// Of several templates, the one that is used.
const DEFAULT: &str = "default";

/// What makes one text of a query and a document.
#[derive(Clone, Debug)]
pub struct PairTemplate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    environment: Environment<'static>,
    /// Whether contents come in parts that say what they are.
    structured: bool,
    /// What comes before each pair.
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

/// What sentence-transformers passes on with each call.
#[derive(Default, Deserialize)]
struct RawProcessing {
    #[serde(default)]
    chat_template: Map<String, Json>,
    #[serde(default)]
    text: Map<String, Json>,
    #[serde(default)]
    common: Map<String, Json>,
}

/// A source, and where it was found.
struct Source {
    path: PathBuf,
    text: String,
    /// Whether it is one of several by name, which the inference of the format does not look into.
    named: bool,
}

/// Refuses a chat template beside a reranker with a head, whose pairs are joined by their tokens here:
/// sentence-transformers would show it each pair by the template.
pub(super) fn refuse_for_labels(folder: &Path, head: Option<&LabelHead>) -> Result<(), ModelError> {
    if head.is_none_or(|head| head.labels.len() > 1) {
        return Ok(());
    }
    let path = folder.join(TOKENIZER);
    let tokenizer: Map<String, Json> = optional_json(&path)?.unwrap_or_default();
    let is_there = tokenizer.get("chat_template").is_some_and(|template| !template.is_null());
    if !is_there && !folder.join(FILE).exists() {
        return Ok(());
    }
    let problem = format!(
        "`chat_template` (or {FILE}) is there beside a reranker with a head, and sentence-transformers would show it each pair \
         by the template, which is not supported; remove the template if the model was trained on pairs as they are"
    );
    Err(ModelError::Content { path, problem })
}

/// Whether the model has a chat template that writes a query and a document, as rerankers have and chats have not.
pub(super) fn judges_pairs(folder: &Path) -> bool {
    PairTemplate::read(folder, false, None).is_ok()
}

impl PairTemplate {
    /// That of the model in this folder, whose task is `system`. `listed` says whether it has a list of stages: then what
    /// stands beside it decides how pairs are read, and otherwise that there is a template.
    pub(super) fn read(
        folder: &Path,
        listed: bool,
        system: Option<&str>,
    ) -> Result<PairTemplate, ModelError> {
        // Of a model without a list of stages the library reads no such file.
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
        let environment = environment(&text, &tokenizer, variables).map_err(|error| refuse(said(&error)))?;
        let template = PairTemplate(Arc::new(Inner { environment, structured, system }));
        template.try_out().map_err(refuse)?;
        // A list where a text is expected, which Python would write in its own way.
        let writes_parts = || template.render("a", "b").is_ok_and(|text| text.contains("[{"));
        if structured && !text.contains("tojson") && writes_parts() {
            return Err(refuse(
                "`modality_config` has the `format` structured, and the template reads contents as texts"
                    .to_owned(),
            ));
        }
        Ok(template)
    }

    /// The text of a pair; an error is what the template said.
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
        rendered.map_err(|error| said(&error))
    }

    /// Where query and document stand in what was rendered of them, in bytes; they do not overlap.
    pub fn places(&self, query: &str, document: &str, rendered: &str) -> Result<[Range<usize>; 2], String> {
        // What differs when something else is in its place is where it stands. Both begin and end otherwise, so that it
        // differs from at least one of them at either end.
        const OTHERS: [&str; 2] = ["0", "1 2"];
        let place = |renders: [Result<String, String>; 2]| -> Result<Range<usize>, String> {
            let (mut start, mut behind) = (rendered.len(), rendered.len());
            for other in renders {
                let other = in_common(rendered, &other?);
                (start, behind) = (start.min(other.0), behind.min(other.1));
            }
            Ok(start..(rendered.len() - behind).max(start))
        };
        let of_query = place(OTHERS.map(|other| self.render(other, document)))?;
        let of_document = place(OTHERS.map(|other| self.render(query, other)))?;
        if of_query.start < of_document.end && of_document.start < of_query.end {
            // A template that writes them more than once: all between is one text.
            let all = of_query.start.min(of_document.start)..of_query.end.max(of_document.end);
            return Ok([all.start..all.start, all]);
        }
        Ok([of_query, of_document])
    }

    /// Whether both texts come through: what is rendered changes with either of them.
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
            "the template drops the {}: each comes as a message of that role, and the template has to write it; take a \
             revision of the model whose template does, or write one to {FILE}",
            dropped.join(" and the ")
        ))
    }
}

impl RawSentence {
    /// Whether contents come in parts, if it is said.
    fn format(&self, listed: bool) -> Result<Option<bool>, String> {
        if self.do_lower_case {
            return Err("`do_lower_case` = true is not supported with a chat template".to_owned());
        }
        let message = self.modality_config.as_ref().and_then(|modalities| modalities.get("message"));
        if message.is_none() && (listed || self.modality_config.is_some()) {
            return Err("`modality_config` has no `message`: a cross-encoder that judges by words and reads its pairs \
                        without a chat template is not supported; give it one and save it again, with \
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

    /// What the template is given beside the pair.
    fn variables(self) -> Result<Map<String, Json>, String> {
        let RawProcessing { chat_template: mut variables, text, common } = self.processing_kwargs;
        // They change what is computed in other ways than by being read.
        let others =
            ["chat_template", "continue_final_message", "max_length", "truncation", "tools", "documents"];
        if let Some(key) = others.iter().find(|key| variables.contains_key(**key)) {
            return Err(format!("`processing_kwargs` has `chat_template.{key}`, which is not supported"));
        }
        // Nor does this change what a sequence comes to.
        let without_effect = ["padding", "logits_to_keep"];
        if let Some(key) =
            text.keys().chain(common.keys()).find(|key| !without_effect.contains(&key.as_str()))
        {
            return Err(format!(
                "`processing_kwargs` has `{key}` for texts, which is not supported; `model_max_length` of \
                 {TOKENIZER} says how long they may be"
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
    struct Named {
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
                "there is no chat template, by which a language model that judges pairs is shown them: `chat_template` is \
                 not here and {FILE} not beside it; write one that writes the messages of the roles query and document"
            )));
        }
        Some(Json::String(text)) => {
            return Ok(Source { text: text.clone(), path, named: false });
        }
        Some(given) => given,
    };
    let named: Vec<Named> = serde_json::from_value(given.clone()).map_err(|_| {
        refuse("`chat_template` is neither a template nor a list of those with names".to_owned())
    })?;
    let names: Vec<String> = named.iter().map(|template| template.name.clone()).collect();
    match named.into_iter().find(|template| template.name == DEFAULT) {
        Some(Named { template: text, .. }) => Ok(Source { path, text, named: true }),
        None => Err(refuse(format!(
            "`chat_template` has {}, and none is called {DEFAULT}, which is the one that is used",
            names.join(", ")
        ))),
    }
}

/// Whether a template reads contents in parts, as sentence-transformers guesses it by what stands in it.
fn in_parts(source: &str) -> bool {
    // `message.content[0]` and `item.type` have these in them.
    ["content[0]", ".type", "'type'", "\"type\"", "message.content["].iter().any(|sign| source.contains(sign))
}

/// What transformers gives a template.
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
    // Python's Jinja knows no other line ends.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(FILE, source)?;
    Ok(environment)
}

/// JSON as Python writes it: a space behind commas and colons, characters as they are.
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
    // Indentation and the like would be other text.
    options.assert_all_used()?;
    let mut text = Vec::new();
    let broken = |error: String| Error::new(ErrorKind::BadSerialization, error);
    value
        .serialize(&mut Serializer::with_formatter(&mut text, Spaced))
        .map_err(|error| broken(error.to_string()))?;
    String::from_utf8(text).map_err(|error| broken(error.to_string()))
}

/// How many bytes two texts have in common at their beginnings, and how many at their ends.
fn in_common(a: &str, b: &str) -> (usize, usize) {
    let same = |(a, b): &(u8, u8)| a == b;
    let before = a.bytes().zip(b.bytes()).take_while(same).count();
    let behind = a.bytes().rev().zip(b.bytes().rev()).take_while(same).count();
    (before, behind)
}

/// What went wrong, in the engine's or the template's own words, and in which line.
fn said(error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("it takes more than {FUEL} steps");
    }
    let line = error.line().map(|line| format!(", line {line} of the template")).unwrap_or_default();
    let detail = error.detail().map(str::to_owned).unwrap_or_else(|| error.kind().to_string());
    format!("{detail}{line}")
}

#[cfg(test)]
mod tests;
