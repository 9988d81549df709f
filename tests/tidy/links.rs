//! Links between our pages resolve: the file exists, and so does the heading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use crate::tree::{File, files, root};

/// Returns the targets of `[text](target)` outside of code blocks.
fn targets(text: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for line in prose(text) {
        for (at, _) in line.match_indices("](") {
            if let Some((target, _)) = line[at + 2..].split_once(')') {
                targets.push(target.trim_matches(['<', '>']).to_owned());
            }
        }
    }
    targets
}

fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Returns the anchors of a page's headings, as on GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings =
        prose(text).filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let kept = heading.to_lowercase().replace(' ', "-");
            kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
        })
        .collect()
}

/// Resolves `target` relative to the directory of `page`.
fn resolve(page: &str, target: &str) -> String {
    let mut resolved = PathBuf::new();
    for part in Path::new(page).parent().unwrap_or(Path::new("")).join(target).components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            Component::Normal(part) => resolved.push(part),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    resolved.to_string_lossy().into_owned()
}

fn complaints(pages: &[File], exists: impl Fn(&str) -> bool) -> Vec<String> {
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|page| (page.path.as_str(), anchors(&page.text))).collect();
    let mut complaints = Vec::new();
    for page in pages {
        for target in targets(&page.text).into_iter().filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if path.is_empty() { page.path.clone() } else { resolve(&page.path, path) };
            let known = |anchors: &BTreeSet<String>| anchor.is_empty() || anchors.contains(anchor);
            if !exists(&file) || !anchors.get(file.as_str()).is_none_or(known) {
                complaints.push(format!("{}: {target} does not exist", page.path));
            }
        }
    }
    complaints
}

#[test]
fn every_link_between_our_pages_resolves() {
    let pages = files(|path| path.ends_with(".md"));
    let complaints = complaints(&pages, |path| root().join(path).exists());
    assert!(!pages.is_empty() && complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn a_link_to_a_missing_page_or_heading_is_found() {
    let page = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let pages = [
        page(
            "README.md",
            "# Top\n[a](docs/a.md#a-heading-or-two) [b](docs/b.md) [t](#top) [w](https://x.y/z)\n",
        ),
        page(
            "docs/a.md",
            "## A heading, or two\n[up](../README.md#bottom)\n```\n[code](nowhere)\n# no heading\n```\n",
        ),
    ];
    let exists = |path: &str| pages.iter().any(|page| page.path == path);
    assert_eq!(
        complaints(&pages, exists),
        ["README.md: docs/b.md does not exist", "docs/a.md: ../README.md#bottom does not exist"]
    );
}
