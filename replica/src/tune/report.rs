//! What tuning says in the end: tables for people, JSON for machines.

use std::fmt::Write;
use std::time::Duration;

use replica_core::Precision;
use serde_json::{Value, json};

use super::curve::Point;
use super::plan::{Choice, Setting};
use super::quality::Quality;
use super::{Report, plot};

/// With a load of so much for each core, what was measured is not this machine alone.
const BUSY: f64 = 0.5;

impl Report {
    /// The curve, the plot, what was chosen, and what it brings.
    pub fn table(&self) -> String {
        let Report { tuned, points, qualities, before, comparison, file, plot: drawn, took, others } = self;
        let mut table = format!("{} on {}, in {:.0} s\n\n", tuned.source, tuned.hardware, took.as_secs_f64());
        let _ = writeln!(
            table,
            "{:<9} {:>7} {:>7} {:>10} {:>9} {:>9} {:>6}",
            "precision", "threads", "tokens", "tokens/s", "p50 ms", "p99 ms", "turns"
        );
        for point in points {
            let Point { setting, tokens_per_second, batch_p50, batch_p99, turns } = point;
            let Setting { precision, threads, batch_tokens } = setting;
            let mark = if self.is_chosen(setting) { "  chosen" } else { "" };
            let _ = writeln!(
                table,
                "{precision:<9} {threads:>7} {batch_tokens:>7} {tokens_per_second:>10.0} {:>9.2} {:>9.2} {turns:>6}{mark}",
                millis(*batch_p50),
                millis(*batch_p99),
            );
        }
        let _ = write!(table, "\n{}\n", plot::terminal(points, &tuned.choices));
        for (precision, Quality { texts, mean_cosine, min_cosine }) in qualities {
            let _ = writeln!(
                table,
                "{precision} beside f32, over {texts} texts: mean cosine {mean_cosine:.4}, least {min_cosine:.4}{}",
                if qualities_suffice(qualities, *precision) { "" } else { ": not good enough" }
            );
        }
        for choice in &tuned.choices {
            table.push_str(&sentence(choice));
        }
        if let Some((old, new)) = comparison {
            let _ = writeln!(
                table,
                "before: {old:.0} tokens/s ({} threads, {} tokens a batch, {}); after: {new:.0} tokens/s, {:.2} x",
                before.threads,
                before.batch_tokens,
                before.precision,
                new / old.max(f64::MIN_POSITIVE)
            );
        }
        if let Some(others) = others.filter(|others| *others > BUSY) {
            let _ = writeln!(
                table,
                "others were using this machine (a load of {others:.1} for each core): measure again when it is idle"
            );
        }
        if let Some(recommended) = self.recommended() {
            let _ = writeln!(
                table,
                "{recommended} is the fastest precision that is good enough; a replica computes in it only if its deployment \
                 says precision = \"{recommended}\""
            );
        }
        let _ = write!(
            table,
            "settings: {}\nplot: {}\nA replica of this model on this machine takes them at its next start.",
            file.display(),
            drawn.display()
        );
        table
    }

    /// The same for machines.
    pub fn to_json(&self) -> Value {
        let Report { tuned, points, qualities, before, comparison, file, plot, took, others } = self;
        let setting = |setting: &Setting| {
            let Setting { precision, threads, batch_tokens } = setting;
            json!({"precision": precision.as_str(), "threads": threads.get(), "batch_tokens": batch_tokens})
        };
        let curve: Vec<Value> = points
            .iter()
            .map(|point| {
                let Point { setting: of, tokens_per_second, batch_p50, batch_p99, turns } = point;
                let mut value = setting(of);
                value["tokens_per_second"] = json!(tokens_per_second.round());
                value["batch_p50_ms"] = json!(millis(*batch_p50));
                value["batch_p99_ms"] = json!(millis(*batch_p99));
                value["turns"] = json!(turns);
                value
            })
            .collect();
        let choices: Vec<Value> = tuned
            .choices
            .iter()
            .map(|Choice { precision, threads, batch, tokens_per_second, target_met }| {
                json!({
                    "precision": precision.as_str(), "threads": threads.get(), "batch_tokens": batch.batch_tokens,
                    "interactive_batch_tokens": batch.interactive_batch_tokens,
                    "bulk_share_percent": batch.bulk_share_percent, "window_max_ms": millis(batch.window_max),
                    "tokens_per_second": tokens_per_second.round(), "target_met": target_met,
                })
            })
            .collect();
        let quality: Vec<Value> = qualities
            .iter()
            .map(|(precision, Quality { texts, mean_cosine, min_cosine })| {
                json!({"precision": precision.as_str(), "texts": texts, "mean_cosine": mean_cosine,
                       "min_cosine": min_cosine})
            })
            .collect();
        json!({
            "model": tuned.source, "digest": tuned.digest, "hardware": tuned.hardware, "settings": choices,
            "recommended_precision": self.recommended().map(Precision::as_str), "quality": quality, "curve": curve, "before": setting(before),
            "tokens_per_second": comparison.map(|(before, after)| json!({"before": before.round(), "after": after.round()})),
            "file": file, "plot": plot, "seconds": took.as_secs_f64(),
            "others_per_core": others,
        })
    }

    /// The precision that is worth a change of the deployment: the fastest, where that is not the one that is usual.
    fn recommended(&self) -> Option<Precision> {
        let fastest = self.tuned.choices.first().map(|choice| choice.precision);
        fastest.filter(|precision| *precision != Precision::F32)
    }

    fn is_chosen(&self, setting: &Setting) -> bool {
        self.tuned.choices.iter().any(|choice| {
            let Choice { precision, threads, batch, .. } = choice;
            (*precision, *threads, batch.batch_tokens)
                == (setting.precision, setting.threads, setting.batch_tokens)
        })
    }
}

fn qualities_suffice(
    qualities: &[(replica_core::Precision, Quality)],
    precision: replica_core::Precision,
) -> bool {
    qualities.iter().any(|(of, quality)| *of == precision && quality.suffices())
}

fn sentence(choice: &Choice) -> String {
    let Choice { precision, threads, batch, tokens_per_second, target_met } = choice;
    let target = match target_met {
        Some(false) => "; the target cannot be met, this comes nearest",
        Some(true) => "; meets the target",
        None => "",
    };
    format!(
        "{precision}: {threads} threads, {} tokens a batch, {} while there are lookups, window {:.2} ms: \
         {tokens_per_second:.0} tokens/s{target}\n",
        batch.batch_tokens,
        batch.interactive_batch_tokens,
        millis(batch.window_max),
    )
}

fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
