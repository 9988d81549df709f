//! Every configuration file is valid TOML and referenced by Rust code.

use crate::tree::{File, files};

fn complaints(configs: &[File], sources: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for File { path, text } in configs {
        if let Err(error) = text.parse::<toml::Table>() {
            complaints.push(format!("{path} is not TOML: {error}"));
        }
        if !sources.iter().any(|source| source.text.contains(path.as_str())) {
            complaints
                .push(format!("{path} is named in no Rust file, so nothing checks that it is accepted"));
        }
    }
    complaints
}

#[test]
fn every_configuration_file_parses_and_is_read_by_code() {
    let configs = files(|path| path.starts_with("configs/") && path.ends_with(".toml"));
    let complaints = complaints(&configs, &files(|path| path.ends_with(".rs")));
    assert!(!configs.is_empty() && complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn an_unreferenced_configuration_file_is_found() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let source = file("a.rs", "include_str!(\"../configs/a.toml\")");
    let configs = [file("configs/a.toml", "a = 1"), file("configs/b.toml", "b =")];
    let complaints = complaints(&configs, &[source]);
    assert_eq!(complaints.len(), 2, "{complaints:?}");
    assert!(complaints.iter().all(|complaint| complaint.starts_with("configs/b.toml")), "{complaints:?}");
}
