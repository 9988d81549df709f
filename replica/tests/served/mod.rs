//! Harness: a replica on loopback with a small model, and a client that can misbehave.
//!
//! The model is a real BERT with random weights, so that the whole path is real: files, tokenizer, planner, engine. It
//! is generated from a seed instead of being committed: the correctness of its numbers is tested by the golden tests.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::{Config, ServeError};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;

pub(crate) const HIDDEN: usize = 64;
const INNER: usize = 128;
const LAYERS: usize = 2;
pub(crate) const VOCABULARY: usize = 200;
/// Maximum tokens of an input. There are no special tokens: a text of `n` words has `n` tokens.
pub(crate) const MAX_TOKENS: usize = 128;

/// Kind of the small model.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Embedding model without special tokens, prompts and normalization.
    Plain,
    /// Embedding model with special tokens, [`PROMPTS`] and normalization.
    Prompted,
    /// Classifier with these labels, and special tokens.
    Labels(&'static [&'static str]),
    /// The same, with [`PROMPTS`], of which the query's is the default.
    Instructed(&'static [&'static str]),
}

/// Prompts of [`Kind::Prompted`], by name.
pub(crate) const PROMPTS: [(&str, &str); 2] = [("query", "w9 w9 "), ("document", "w8 ")];
/// Token before a text in models with special tokens, and the one after each text.
pub(crate) const SPECIAL: [u32; 2] = [198, 199];

/// Writes the plain model into `folder`.
pub(crate) fn write_model(folder: &Path) {
    write_kind(folder, Kind::Plain);
}

/// Writes a model into `folder`.
pub(crate) fn write_kind(folder: &Path, kind: Kind) {
    let mut config = json!({
        "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "intermediate_size": INNER, "max_position_embeddings": MAX_TOKENS,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let words: serde_json::Map<String, Value> = (1..VOCABULARY)
        .map(|id| (format!("w{id}"), json!(id)))
        .chain([("[UNK]".to_owned(), json!(0))])
        .collect();
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": words},
    });
    let labels = match kind {
        Kind::Plain => &[][..],
        Kind::Prompted => {
            write_stages(folder);
            &[]
        }
        Kind::Labels(labels) | Kind::Instructed(labels) => {
            config["architectures"] = json!(["BertForSequenceClassification"]);
            let names = labels.iter().enumerate().map(|(id, label)| (id.to_string(), json!(label)));
            config["id2label"] = Value::Object(names.collect());
            labels
        }
    };
    if !matches!(kind, Kind::Plain) {
        add_special_tokens(&mut tokenizer);
    }
    if matches!(kind, Kind::Instructed(_)) {
        write_prompts(folder, Some("query"));
    }
    fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("a file");
    fs::write(folder.join("model.safetensors"), weights(labels.len())).expect("a file");
}

/// Writes the files of sentence-transformers beside the transformer.
fn write_stages(folder: &Path) {
    let stage = |idx: usize, path: &str, class: &str| json!({"idx": idx, "name": idx.to_string(), "path": path, "type": format!("sentence_transformers.models.{class}")});
    let stages =
        [stage(0, "", "Transformer"), stage(1, "1_Pooling", "Pooling"), stage(2, "2_Normalize", "Normalize")];
    fs::write(folder.join("modules.json"), json!(stages).to_string()).expect("a file");
    fs::create_dir(folder.join("1_Pooling")).expect("a folder");
    let pooling = json!({"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": true});
    fs::write(folder.join("1_Pooling/config.json"), pooling.to_string()).expect("a file");
    write_prompts(folder, None);
}

fn write_prompts(folder: &Path, default: Option<&str>) {
    let prompts: BTreeMap<&str, &str> = PROMPTS.into_iter().collect();
    let prompts = json!({"prompts": prompts, "default_prompt_name": default});
    fs::write(folder.join("config_sentence_transformers.json"), prompts.to_string()).expect("a file");
}

/// Adds the template `[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]`, the second text with type 1.
fn add_special_tokens(tokenizer: &mut Value) {
    let names = ["[CLS]", "[SEP]"];
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    for (name, id) in names.into_iter().zip(SPECIAL) {
        vocabulary.remove(&format!("w{id}"));
        vocabulary.insert(name.to_owned(), json!(id));
    }
    let added = |(content, id): (&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    tokenizer["added_tokens"] = names.into_iter().zip(SPECIAL).map(added).collect();
    let special = |name: &str, kind: u32| json!({"SpecialToken": {"id": name, "type_id": kind}});
    let text = |name: &str, kind: u32| json!({"Sequence": {"id": name, "type_id": kind}});
    let token = |name: &str, id: u32| (name.to_owned(), json!({"id": name, "ids": [id], "tokens": [name]}));
    let tokens: serde_json::Map<String, Value> =
        names.into_iter().zip(SPECIAL).map(|(name, id)| token(name, id)).collect();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)],
        "pair": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0), text("B", 1), special("[SEP]", 1)],
        "special_tokens": tokens,
    });
}

fn weights(labels: usize) -> Vec<u8> {
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("embeddings.word_embeddings.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("embeddings.position_embeddings.weight".to_owned(), vec![MAX_TOKENS, HIDDEN]),
        ("embeddings.token_type_embeddings.weight".to_owned(), vec![2, HIDDEN]),
    ];
    let mut module = |name: &str, rows: Option<usize>, columns: usize| {
        shapes.push((format!("{name}.weight"), rows.into_iter().chain([columns]).collect()));
        shapes.push((format!("{name}.bias"), vec![rows.unwrap_or(columns)]));
    };
    module("embeddings.LayerNorm", None, HIDDEN);
    for layer in 0..LAYERS {
        let layer = format!("encoder.layer.{layer}");
        for part in ["self.query", "self.key", "self.value", "output.dense"] {
            module(&format!("{layer}.attention.{part}"), Some(HIDDEN), HIDDEN);
        }
        module(&format!("{layer}.intermediate.dense"), Some(INNER), HIDDEN);
        module(&format!("{layer}.output.dense"), Some(HIDDEN), INNER);
        module(&format!("{layer}.attention.output.LayerNorm"), None, HIDDEN);
        module(&format!("{layer}.output.LayerNorm"), None, HIDDEN);
    }
    if labels > 0 {
        shapes.iter_mut().for_each(|(name, _)| name.insert_str(0, "bert."));
        for (name, rows) in [("bert.pooler.dense", HIDDEN), ("classifier", labels)] {
            shapes.push((format!("{name}.weight"), vec![rows, HIDDEN]));
            shapes.push((format!("{name}.bias"), vec![rows]));
        }
    }
    let mut random = SmallRng::seed_from_u64(2);
    let mut number = |_| (random.random::<f32>() - 0.5).to_le_bytes();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let bytes = (0..shape.iter().product()).flat_map(&mut number).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor"))
    });
    safetensors::serialize(views, None).expect("a file of tensors")
}

/// Running replica. Dropping it stops it and waits for its end.
pub(crate) struct TestReplica {
    pub(crate) address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
    /// Removed when the replica has ended.
    model: Option<TempDir>,
}

impl TestReplica {
    /// Starts a replica of the plain model; `toml` is added to its configuration.
    pub(crate) fn start(toml: &str) -> TestReplica {
        TestReplica::of(Kind::Plain, toml)
    }

    /// Starts a replica of a model of this kind.
    pub(crate) fn of(kind: Kind, toml: &str) -> TestReplica {
        let model = tempfile::tempdir().expect("a folder");
        write_kind(model.path(), kind);
        let config = config("127.0.0.1:0", model.path(), toml);
        let mut served = TestReplica::with(config);
        served.model = Some(model);
        served
    }

    /// Starts a replica with this configuration.
    pub(crate) fn with(config: Config) -> TestReplica {
        let (message_of, address) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            serve(config, stopped, move |address| message_of.send(address).expect("a test"))
        });
        match address.recv() {
            Ok(address) => TestReplica { address, stop: Some(stop), thread: Some(thread), model: None },
            Err(_) => {
                panic!("it does not become ready: {}", thread.join().expect("its end").expect_err("a reason"))
            }
        }
    }

    /// Signals shutdown.
    pub(crate) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The send fails if the replica has already ended; joining reports it.
            let _ = stop.send(());
        }
    }

    /// Returns the result of `run`.
    pub(crate) fn ended(&mut self) -> Result<(), ServeError> {
        self.thread.take().expect("it ends once").join().expect("it does not panic")
    }

    /// Sends a request over its own connection, and returns the response.
    pub(crate) fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut call = self.open(method, path, headers, Some(body.len()));
        call.write_all(body).expect("to send the body");
        Response::read(call)
    }

    /// Sends the head of a request; without a length the body is chunked.
    pub(crate) fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        length: Option<usize>,
    ) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("a connection");
        let length = match length {
            Some(length) => format!("content-length: {length}"),
            None => "transfer-encoding: chunked".to_owned(),
        };
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{length}\r\n");
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        stream.write_all(format!("{head}\r\n").as_bytes()).expect("to send the head");
        stream
    }

    pub(crate) fn embed(&self, body: &Value) -> Response {
        self.call("POST", "/v1/embeddings", &[], body.to_string().as_bytes())
    }

    /// Returns the vectors of these texts, requested from the model `small`.
    pub(crate) fn vectors(&self, texts: &[String]) -> Vec<Vec<f32>> {
        let response = self.embed(&json!({"model": "small", "input": texts}));
        assert_eq!(response.status, 200, "{}", response.text());
        response.vectors()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.call("POST", path, &[], body.to_string().as_bytes())
    }

    /// Returns the body of a successful response.
    #[track_caller]
    pub(crate) fn post_ok(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        response.json()
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        serde_json::from_slice(&self.call("GET", path, &[], b"").body).expect("JSON")
    }

    /// Waits until the predicate holds for `/status`.
    pub(crate) fn wait_until(&self, is_reached: impl Fn(&Value) -> bool) {
        while !is_reached(&self.get("/status")) {
            thread::yield_now();
        }
    }
}

impl Drop for TestReplica {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(thread::panicking() || matches!(ended, Ok(Ok(()))), "{ended:?}");
        }
        self.model = None;
    }
}

/// Returns a configuration for the model in `folder`, with the names `small` and `other`. It accepts token ids, unless
/// `toml` sets that option.
pub(crate) fn config(listen: &str, folder: &Path, toml: &str) -> Config {
    let accepts = if toml.contains("token_inputs") { "" } else { "token_inputs = true\n" };
    let folder = folder.to_str().expect("a path");
    let cache = format!("{folder}/cache");
    let text = format!(
        "listen = {listen:?}\nnames = [\"small\", \"other\"]\nmodel = {folder:?}\ncache = {cache:?}\n{accepts}{toml}"
    );
    text.parse().expect("a configuration")
}

/// Serves on a runtime of its own until it is stopped.
pub(crate) fn serve(
    config: Config,
    stopped: oneshot::Receiver<()>,
    ready: impl FnOnce(SocketAddr) + Send,
) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let shutdown = async move {
        stopped.await.expect("the test stops the process");
    };
    runtime.expect("a runtime").block_on(replica::run(config, shutdown, ready))
}

/// Response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn read(stream: TcpStream) -> Response {
        let mut stream = BufReader::new(stream);
        let mut line = || {
            let mut line = String::new();
            stream.read_line(&mut line).expect("a line of the head");
            line.trim_end().to_owned()
        };
        let status = line().split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let mut headers = BTreeMap::new();
        loop {
            let line = line();
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_owned(), value.to_owned());
        }
        let length = headers.get("content-length").and_then(|length| length.parse().ok()).expect("a length");
        let mut body = vec![0; length];
        stream.read_exact(&mut body).expect("the body");
        Response { status, headers, body }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).chars().take(500).collect()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub(crate) fn vectors(&self) -> Vec<Vec<f32>> {
        let response: replica_api::openai::EmbeddingsResponse =
            serde_json::from_slice(&self.body).expect("a response with vectors");
        response.data.iter().map(|row| row.embedding.values().expect("numbers")).collect()
    }
}
