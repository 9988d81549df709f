//! The stock clients of the ecosystems, unmodified, against a replica: each is a script under `tests/clients`.
//!
//! They need Python with venv and, the first time, a package index. Where there is no Python there is nothing to run
//! them with, and the test says so; where there is, everything that goes wrong is a failure.

use std::path::Path;
use std::process::Command;

use crate::served::{Kind, Served};

/// Each package, and the module by which it is known to be there.
const PACKAGES: [(&str, &str); 5] = [
    ("openai", "openai"),
    ("cohere", "cohere"),
    ("huggingface_hub", "huggingface_hub"),
    // Its vectors are arrays.
    ("numpy", "numpy"),
    ("langchain-openai", "langchain_openai"),
];

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
    let imports = PACKAGES.map(|(_, module)| format!("import {module}")).join("\n");
    let there = Command::new(&python).args(["-c", &imports]).output().expect("python runs");
    if !there.status.success() {
        let packages = PACKAGES.map(|(package, _)| package);
        let install = Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages).status();
        assert!(install.expect("pip runs").success(), "pip could not install {packages:?}");
    }
    let embeds = Served::of(Kind::Prompted, "");
    let ranks = Served::of(Kind::Labels(&["LABEL_0"]), "");
    let classifies = Served::of(Kind::Labels(&["good", "bad", "neither"]), "");
    let url = |replica: &Served| format!("http://{}", replica.address);
    let check = |script: &str, replicas: &[&Served]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
        let mut run = Command::new(&python);
        // A proxy of this machine knows nothing of its loopback.
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
