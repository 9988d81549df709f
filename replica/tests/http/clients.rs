//! The stock clients of the ecosystems, unmodified, against a replica: each is a script under `tests/clients`.
//!
//! They need Python with venv and, the first time, a package index. Without Python the test is skipped with a message;
//! with Python every problem is a failure.

use std::path::Path;
use std::process::Command;

use crate::served::{Kind, TestReplica};

/// Packages, each in one version: those of `docs/clients.md`.
const REQUIREMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/clients/requirements.txt");

#[test]
fn the_stock_clients_work_by_changing_their_base_url() {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stock-clients");
    let python = venv.join("bin/python");
    if !python.exists() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("no python3 with venv on this machine: the stock clients are not run");
            return;
        }
    }
    // A copy of the requirements file marks a complete installation.
    let (expected, installed) =
        (std::fs::read(REQUIREMENTS).expect("a file"), venv.join("installed-requirements.txt"));
    if std::fs::read(&installed).ok().as_ref() != Some(&expected) {
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS];
        assert!(Command::new(&python).args(pip).status().expect("pip runs").success(), "pip failed");
        std::fs::write(&installed, expected).expect("a file");
    }
    let embeds = TestReplica::of(Kind::Prompted, "");
    let ranks = TestReplica::of(Kind::Labels(&["LABEL_0"]), "");
    let classifies = TestReplica::of(Kind::Labels(&["good", "bad", "neither"]), "");
    let url = |replica: &TestReplica| format!("http://{}", replica.address);
    let check = |script: &str, replicas: &[&TestReplica]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
        let mut run = Command::new(&python);
        // A proxy of this machine cannot reach its loopback.
        run.arg(&script).args(replicas.iter().copied().map(url)).env("NO_PROXY", "127.0.0.1");
        let run = run.output().expect("python runs");
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && said.contains("works"), "{}: {said}", script.display());
        print!("{said}");
    };
    check("openai_embeddings.py", &[&embeds]);
    check("cohere_rerank.py", &[&ranks, &embeds]);
    check("hugging_face.py", &[&embeds, &classifies]);
    check("langchain_embeddings.py", &[&embeds]);
}
