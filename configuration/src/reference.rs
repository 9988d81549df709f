//! Reference of all keys, as Markdown.

use std::fmt::Write;

use crate::section::{Key, Section};

/// Returns the tables of a file kind: one for the file and one for each section.
pub fn reference<T: Section>(title: &str) -> String {
    let mut text = format!("\n## {title}\n");
    add(&mut text, "", T::ABOUT, &T::keys());
    text
}

fn add(text: &mut String, path: &str, about: &str, keys: &[Key]) {
    write!(
        text,
        "\n{}\n\n| key | type | default | limits | description |\n|---|---|---|---|---|\n",
        about.trim()
    )
    .expect("writing to a String cannot fail");
    for Key { name, about, type_name, default, is_required, limits, section: _ } in keys {
        let default = match (default, is_required) {
            (Some(default), _) => format!("`{default}`"),
            (None, true) => "required".to_owned(),
            (None, false) => String::new(),
        };
        let limits = if type_name.starts_with("list") && !limits.is_empty() {
            format!("{limits} entries")
        } else {
            limits.clone()
        };
        let about = about.replace('|', "\\|");
        writeln!(text, "| `{name}` | {type_name} | {default} | {limits} | {about} |")
            .expect("writing to a String cannot fail");
    }
    for Key { name, type_name, section, .. } in keys {
        let Some((about, keys)) = section else { continue };
        let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
        let (path, heading) = match type_name.as_str() {
            "list of tables" => (path.clone(), format!("[[{path}]]")),
            "table of tables" => (format!("{path}.NAME"), format!("[{path}.NAME]")),
            _ => (path.clone(), format!("[{path}]")),
        };
        write!(text, "\n### `{heading}`\n").expect("writing to a String cannot fail");
        add(text, &path, about, keys);
    }
}
