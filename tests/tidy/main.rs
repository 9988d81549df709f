//! The house rules that a compiler does not hold: who may import whom, what a core may stand on, which words and links
//! may be committed.
//!
//! Each rule is a function from what was read to a list of complaints, and has two tests: the tree has no complaint,
//! and a made-up offender has the one that is expected. A rule that cannot fail holds nothing.

mod configs;
mod cores;
mod imports;
mod links;
mod locked;
mod locks;
mod manifests;
mod tasks;
mod tree;
mod words;

/// Fails with every complaint, if there is one.
fn none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{complaints:#?}");
}
