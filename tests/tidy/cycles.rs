//! No file imports another one that imports it, directly or through others.
//!
//! A file is a module; `use` declarations and inline paths with `crate::`, `super::` and `self::` are followed to the file that
//! defines the name, through re-exports. Not counted: declarations of modules (`mod a;`), re-exports of a module's own children,
//! and paths from a module to its own children (`a::f()` beside `mod a;`), which form one unit with it.

use crate::tree::{File, files};
use std::collections::{BTreeMap, BTreeSet};

/// Files that still import each other. New cycles are not added here.
const KNOWN: &[&[&str]] = &[];

/// One crate: module paths with their files.
type Modules<'a> = BTreeMap<Vec<String>, &'a File>;

/// Imports of each file, by path.
type Imports<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// Import cycles: the files of each, sorted.
fn cycles(all: &[File]) -> Vec<Vec<&str>> {
    let mut crates: BTreeMap<&str, Modules<'_>> = BTreeMap::new();
    for file in all {
        if let Some((root, module)) = module_of(&file.path) {
            crates.entry(root).or_default().insert(module, file);
        }
    }
    let mut imports = Imports::new();
    for modules in crates.values() {
        for (module, file) in modules {
            let code = without_text(file.code());
            let paths = uses(&code).into_iter().chain(inline_paths(&code));
            let found = paths.flat_map(|path| resolve(modules, module, &path, 0));
            imports.insert(&file.path, found.filter(|target| *target != file.path).collect());
        }
    }
    components(&imports)
}

/// Source folder and module path of a file; nothing for tests, benches and build scripts.
fn module_of(path: &str) -> Option<(&str, Vec<String>)> {
    let (root, rest) = match path.strip_prefix("src/") {
        Some(rest) => ("src", rest),
        None => {
            let at = path.find("/src/")?;
            (&path[..at + 4], &path[at + 5..])
        }
    };
    let mut module: Vec<String> = rest.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        module.pop();
    }
    Some((root, module))
}

/// Paths of the `use` declarations of code. Those of inline modules, which are indented, lose the `super` that
/// leads to the file.
fn uses(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let indented = line.starts_with(' ');
        let declaration = line.trim_start();
        // A re-export of a child is part of the module's interface.
        if declaration.starts_with("pub") {
            continue;
        }
        let Some(rest) = declaration.strip_prefix("use ") else { continue };
        let mut tree = rest.to_owned();
        while !tree.contains(';') {
            match lines.next() {
                Some(line) => tree.push_str(line.trim()),
                None => break,
            }
        }
        let mut found = Vec::new();
        expand(tree.split(';').next().unwrap_or_default(), Vec::new(), &mut found);
        for mut path in found {
            if indented && path.first().is_some_and(|first| first == "super") {
                path[0] = "self".to_owned();
            }
            paths.push(path);
        }
    }
    paths
}

/// Paths in expressions, types and attributes, such as `crate::a::f()`. In an inline module `super` leads to the file.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let (mut is_use, mut is_inner) = (false, false);
    for line in code.lines() {
        let declaration = line.trim_start();
        let item = declaration.strip_prefix("pub").map_or(declaration, |rest| {
            rest.strip_prefix('(')
                .and_then(|rest| rest.split_once(')'))
                .map_or(rest, |(_, rest)| rest)
                .trim_start()
        });
        is_inner |= !line.starts_with(' ') && item.starts_with("mod ") && item.ends_with('{');
        is_inner &= line != "}";
        is_use |= item.starts_with("use ");
        if !is_use {
            // The visibility `pub(in crate::a)` names an ancestor, which is no import.
            let line = line
                .split_once("pub(in ")
                .map_or(line, |(_, rest)| rest.split_once(')').map_or("", |(_, rest)| rest));
            let is_path = |sign: char| sign.is_alphanumeric() || matches!(sign, '_' | ':' | '$');
            for path in line.split(|sign: char| !is_path(sign)) {
                // `$crate::` of a macro may be expanded in another crate.
                let mut path: Vec<String> = path.split("::").map(str::to_owned).collect();
                if path.len() < 2 || !matches!(path[0].as_str(), "crate" | "self" | "super") {
                    continue;
                }
                path.retain(|segment| !segment.is_empty());
                if is_inner && path[0] == "super" {
                    path[0] = "self".to_owned();
                }
                paths.push(path);
            }
        }
        is_use &= !line.contains(';');
    }
    paths
}

/// Code without comments and strings, which may contain paths.
fn without_text(code: &str) -> String {
    let mut found = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(sign) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if sign == '"' {
            let mut is_escaped = false;
            let end = rest[1..].find(|sign: char| {
                let is_end = sign == '"' && !is_escaped;
                is_escaped = sign == '\\' && !is_escaped;
                is_end
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if let Some(raw) = rest.strip_prefix("r\"") {
            raw.find('"').map_or(rest.len(), |end| end + 3)
        } else if rest.starts_with("r#\"") {
            rest.find("\"#").map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("'\"'") || rest.starts_with("b'\"'") {
            rest.find("\"'").map_or(rest.len(), |end| end + 2)
        } else {
            found.push(sign);
            rest = &rest[sign.len_utf8()..];
            continue;
        };
        rest = &rest[length..];
    }
    found
}

/// Expands a tree of imports into paths.
fn expand(tree: &str, before: Vec<String>, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let name = tree.split(" as ").next().unwrap_or(tree);
        let rest = name.split("::").map(|segment| segment.trim().to_owned());
        return paths.push(before.into_iter().chain(rest).collect());
    };
    let mut prefix = before;
    prefix.extend(
        tree[..open].split("::").map(str::trim).filter(|segment| !segment.is_empty()).map(str::to_owned),
    );
    let inner = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let (mut depth, mut start) = (0, 0);
    for (at, sign) in inner.char_indices().chain([(inner.len(), ',')]) {
        match sign {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[start..at].trim().is_empty() {
                    expand(&inner[start..at], prefix.clone(), paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// File that defines the name at the end of an import of `module`.
fn resolve<'a>(modules: &Modules<'a>, module: &[String], path: &[String], depth: usize) -> Option<&'a str> {
    let mut at = match path.first().map(String::as_str) {
        Some("crate") => Vec::new(),
        Some("self" | "super") => module.to_vec(),
        _ => return None,
    };
    let mut rest = path;
    while let Some((first, after)) = rest.split_first() {
        match first.as_str() {
            "super" => {
                at.pop()?;
            }
            "crate" | "self" => {}
            segment => {
                let mut child = at.clone();
                child.push(segment.to_owned());
                if !modules.contains_key(&child) {
                    break;
                }
                at = child;
            }
        }
        rest = after;
    }
    let file = modules.get(&at)?;
    // A module that is imported as a whole.
    let Some(name) = rest.first() else { return Some(&file.path) };
    // Follows a re-export to the file that defines the name.
    if depth < 4 {
        for line in file.text.split(';').filter_map(|part| part.trim_start().rsplit_once("pub")) {
            let Some(tree) = line.1.split_once("use ").filter(|(visibility, _)| visibility.len() < 20) else {
                continue;
            };
            let mut exported = Vec::new();
            expand(&tree.1.replace('\n', " "), Vec::new(), &mut exported);
            for mut target in exported.into_iter().filter(|target| target.last() == Some(name)) {
                if !matches!(target[0].as_str(), "crate" | "self" | "super") {
                    target.insert(0, "self".to_owned());
                }
                if let Some(found) = resolve(modules, &at, &target, depth + 1) {
                    return Some(found);
                }
            }
        }
    }
    Some(&file.path)
}

/// Strongly connected components of more than one file.
fn components<'a>(imports: &Imports<'a>) -> Vec<Vec<&'a str>> {
    let reachable = |from: &'a str| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            for next in imports.get(file).into_iter().flatten() {
                if seen.insert(*next) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (*file, reachable(file))).collect();
    let mut found = BTreeSet::new();
    for (file, targets) in &reached {
        let cycle =
            targets.iter().filter(|target| reached.get(*target).is_some_and(|back| back.contains(file)));
        let cycle: Vec<&str> = cycle.copied().collect();
        if cycle.len() > 1 {
            found.insert(cycle);
        }
    }
    found.into_iter().collect()
}

#[test]
fn no_files_import_each_other() {
    let all = files(|path| path.ends_with(".rs"));
    let known: BTreeSet<Vec<&str>> = KNOWN.iter().map(|cycle| cycle.to_vec()).collect();
    let found: BTreeSet<Vec<&str>> = cycles(&all).into_iter().collect();
    let new: Vec<_> = found.difference(&known).collect();
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(new.is_empty(), "new import cycles: {new:#?}");
    assert!(gone.is_empty(), "these cycles are gone; remove them from KNOWN: {gone:#?}");
}

#[test]
fn a_cycle_is_found_through_re_exports_and_nested_imports() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let all = [
        file("x/src/lib.rs", "mod a;\nmod b;\nmod c;\npub use b::Thing;\n"),
        file("x/src/a.rs", "use crate::{c::{Other, More}, Thing};\n"),
        file("x/src/b.rs", "use super::a::f;\npub struct Thing;\n"),
        file(
            "x/src/c.rs",
            "pub struct Other;\nmod inner {\n    use super::*;\n    use crate::b::Thing;\n}\n",
        ),
    ];
    assert_eq!(cycles(&all), [vec!["x/src/a.rs", "x/src/b.rs", "x/src/c.rs"]]);
    // Inline paths: an expression, a type, and the parent of an inline module.
    let inline = [
        file("x/src/a.rs", "fn f() {\n    crate::b::g(\"crate::d::h\", r\"\\\", 'a')\n}\n"),
        file("x/src/b.rs", "struct B(super::c::C);\n// crate::d::D\n"),
        file("x/src/c.rs", "mod inner {\n    fn c() -> super::super::a::A {\n    }\n}\n"),
        file("x/src/d.rs", "pub(in crate::a) struct D(crate::a::A);\n"),
    ];
    assert_eq!(cycles(&inline), [vec!["x/src/a.rs", "x/src/b.rs", "x/src/c.rs"]]);
    let without = [
        file("x/src/a.rs", "use crate::b::f;\n"),
        file("x/src/b.rs", "#[cfg(test)]\nmod tests {\n    use crate::a::g;\n}\n"),
    ];
    assert_eq!(cycles(&without), Vec::<Vec<&str>>::new());
}
