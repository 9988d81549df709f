//! Panics and restarts of this process, which [`supervision`] counts.

use super::text::{Kind, Text};
use supervision::panics::{self, Scope};

/// As two families of counters, with this before their names.
pub(crate) fn render(text: &mut Text, prefix: &str) {
    let name = format!("{prefix}_panics_total");
    text.head(
        &name,
        Kind::Counter,
        "Panics that were contained, by where: each is a defect, and its line is in the log.",
    );
    for scope in Scope::ALL {
        text.sample(&name, &[("scope", scope.as_str())], panics::contained(scope));
    }
    let name = format!("{prefix}_task_restarts_total");
    text.head(&name, Kind::Counter, "Restarts of long-running tasks after a panic or an unexpected end.");
    for (task, restarts) in panics::restarts() {
        text.sample(&name, &[("task", task)], restarts);
    }
}
