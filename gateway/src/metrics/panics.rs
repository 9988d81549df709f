//! Metrics of contained panics and task restarts of this process, which [`supervision`] counts.

use super::text::{Kind, MetricsText};
use supervision::panics::{self, Scope};

/// Writes two counter families; `prefix` precedes their names.
pub(crate) fn render(text: &mut MetricsText, prefix: &str) {
    let name = format!("{prefix}_panics_total");
    text.head(&name, Kind::Counter, "Contained panics, by scope. Each is a defect and is logged.");
    for scope in Scope::ALL {
        text.sample(&name, &[("scope", scope.as_str())], panics::contained(scope));
    }
    let name = format!("{prefix}_task_restarts_total");
    text.head(&name, Kind::Counter, "Restarts of long-running tasks after a panic or an unexpected end.");
    for (task, restarts) in panics::restarts() {
        text.sample(&name, &[("task", task)], restarts);
    }
}
