//! Metrics of every role: each metric is declared once, in a [`metric_set!`].
//!
//! A declaration has the name, the help text (the doc comment of the field), the names of the labels, and a type that
//! holds the values ([`value`], [`label`]). The values of all metrics are collected from the declarations
//! ([`declaration`], [`snapshot`]); `/metrics` ([`text`], in the format that the scrape accepts: [`format`](mod@format)) and the
//! pushes to a collector (`telemetry::metrics`) are made from them, and `docs/metrics.md` ([`page`]) from the declarations. So a
//! metric that is not exported, or that has no help text, does not compile. Histograms keep the trace of the last value in
//! each bucket ([`exemplar`]).
//!
//! Labels are closed sets, so a family is an array of atomics and counting is one relaxed addition. Names from the
//! configuration (regions, tenants, deployments) are the exception: their number is bounded by the configuration.
//!
//! Written here instead of using a library: the libraries keep a family in a map behind a lock, which costs on the
//! request path, and `prometheus-client` appends `_total` to every counter, where TEI's dashboards query
//! `te_request_count`.

pub mod build;
pub mod declaration;
pub mod exemplar;
pub mod format;
pub mod label;
pub mod page;
pub mod snapshot;
pub mod text;
pub mod value;

pub use build::{Build, BuildMetrics};
pub use declaration::{MetricDescription, MetricHead, MetricKind};
pub use exemplar::Exemplar;
pub use format::Format;
pub use label::{ByIndex, ByName, Family, Label, OneOf, Sparse};
pub use snapshot::{MetricSet, MetricsSnapshot};
pub use text::render;
pub use value::{Counter, Gauge, Histogram, Info, Seconds, Sizes, TimeCounter, Total};

/// Declares a struct whose fields are metrics: `field: Type = "name" ["label", …]`. The doc comment of a field is the
/// help text. `field: Type = set` includes another set.
#[macro_export]
macro_rules! metric_set {
    ($(#[$attr:meta])* $vis:vis struct $set:ident $(<$life:lifetime>)? {
        $($(#[doc = $help:literal])+ $field_vis:vis $field:ident: $type:ty = $name:tt $([$($label:literal),+])?,)+
    }) => {
        $(#[$attr])*
        $vis struct $set $(<$life>)? { $($(#[doc = $help])+ $field_vis $field: $type,)+ }

        impl $(<$life>)? $crate::MetricSet for $set $(<$life>)? {
            fn describe(all: &mut Vec<$crate::MetricDescription>) {
                $($crate::metric_set!(@describe all, $type, $name, [$($help),+], [$($($label),+)?]);)+
            }

            fn collect(&self, into: &mut $crate::MetricsSnapshot) {
                let $set { $($field),+ } = self;
                $($crate::metric_set!(@collect into, $field, $name, [$($help),+], [$($($label),+)?]);)+
            }
        }
    };
    (@describe $all:ident, $type:ty, set, $help:tt, $labels:tt) => {
        <$type as $crate::MetricSet>::describe($all)
    };
    (@describe $all:ident, $type:ty, $name:literal, $help:tt, $labels:tt) => {
        const {
            let labels: &[&str] = &$labels;
            assert!(<$type as $crate::snapshot::Metric>::LABELS == labels.len(), "{}", $name);
        }
        $all.push($crate::MetricDescription::of::<$type>($crate::metric_set!(@head $name, $help, $labels)))
    };
    (@collect $into:ident, $field:ident, set, $help:tt, $labels:tt) => {
        $crate::MetricSet::collect($field, $into)
    };
    (@collect $into:ident, $field:ident, $name:literal, $help:tt, $labels:tt) => {
        $into.metric($crate::metric_set!(@head $name, $help, $labels), $field)
    };
    (@head $name:literal, [$($help:literal),+], $labels:tt) => {
        $crate::MetricHead { name: $name, help: concat!($($help),+).trim_ascii_start(), labels: &$labels }
    };
}
