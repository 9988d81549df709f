//! Repository rules that the compiler does not enforce: permitted dependencies, purity of the cores, and words and links
//! that may be committed.
//!
//! Each rule is a function from file contents to a list of complaints, with two tests: the tree has no complaint,
//! and a made-up violation has the expected one, which shows that the rule can fail.

mod configs;
mod cores;
mod cycles;
mod events;
mod imports;
mod language;
mod links;
mod locked;
mod locks;
mod manifests;
mod tasks;
mod tree;
mod words;

/// Fails with all complaints if there are any.
fn none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{complaints:#?}");
}
