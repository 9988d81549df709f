//! Report of a tuning run: a table for people, JSON for programs.

use std::fmt::Write;
use std::time::Duration;

use replica_core::Precision;
use serde_json::{Value, json};

use super::curve::{Point, Setting};
use super::file::{PointV1, QualityV1, SettingsV1};
use super::plan::{Gain, TunedChoice};
use super::quality::Quality;
use super::{Report, plot};

impl Report {
    /// Returns the curve, the plot, the chosen settings, and their gain.
    pub fn table(&self) -> String {
        let Report { tuned, points, qualities, gains, file, plot: drawn, took, others_share } = self;
        let mut table = format!("{} on {}, in {:.0} s\n\n", tuned.source, tuned.hardware, took.as_secs_f64());
        let _ = writeln!(
            table,
            "{:<9} {:>7} {:>7} {:>10} {:>9} {:>9} {:>6}",
            "precision", "threads", "tokens", "tokens/s", "p50 ms", "p99 ms", "runs"
        );
        for point in points {
            let Point { setting, tokens_per_second, tokens_per_second_range: _, batch_p50, batch_p99, runs } =
                point;
            let Setting { precision, threads, batch_tokens } = setting;
            let mark = if self.is_chosen(setting) { "  chosen" } else { "" };
            let _ = writeln!(
                table,
                "{precision:<9} {threads:>7} {batch_tokens:>7} {tokens_per_second:>10.0} {:>9.2} {:>9.2} {runs:>6}{mark}",
                millis(*batch_p50),
                millis(*batch_p99),
            );
        }
        let _ = write!(table, "\n{}\n", plot::terminal(points, &tuned.choices));
        for (precision, Quality { texts, mean_cosine, min_cosine }) in qualities {
            let _ = writeln!(
                table,
                "{precision} compared with f32 ({texts} texts): mean cosine {mean_cosine:.4}, minimum {min_cosine:.4}{}",
                if is_sufficient_for(qualities, *precision) { "" } else { ": not accurate enough" }
            );
        }
        for choice in &tuned.choices {
            table.push_str(&sentence(choice));
        }
        for Gain { before, after, tokens_per_second_before: old, tokens_per_second_after: new } in gains {
            let _ = writeln!(
                table,
                "{}: before {old:.0} tokens/s ({} threads, {} tokens a batch), after {new:.0} tokens/s, {:.2} x",
                after.precision,
                before.threads,
                before.batch_tokens,
                new / old.max(f64::MIN_POSITIVE)
            );
        }
        if let Some(recommended) = self.recommended() {
            let _ = writeln!(
                table,
                "{recommended} is the fastest precision that is accurate enough; a replica uses it only if its \
                 deployment has precision = \"{recommended}\""
            );
        }
        if let Some(drawn) = drawn {
            let _ = writeln!(table, "plot: {}", drawn.display());
        }
        if let Err(reason) = others_share {
            let _ = writeln!(table, "CPU time of other processes not checked: {reason}");
        }
        let busy = tuned.busy_share.map_or_else(String::new, |share| {
            format!(" (kept, although other processes used {:.0} % of the CPU time)", 100.0 * share)
        });
        let _ = match file {
            Some(file) => write!(
                table,
                "settings: {}{busy}\nReplicas of this model on this machine use them from their next start.",
                file.display()
            ),
            None => write!(
                table,
                "settings: not kept, because other processes used {:.0} % of the CPU time; repeat on an idle machine, or keep \
                 them with --keep",
                100.0 * tuned.busy_share.unwrap_or_default()
            ),
        };
        table
    }

    /// Returns the report as JSON.
    pub fn to_json(&self) -> Value {
        let Report { tuned, points, qualities, gains, file, plot, took, others_share } = self;
        let setting = |setting: &Setting| {
            let Setting { precision, threads, batch_tokens } = setting;
            json!({"precision": precision.as_str(), "threads": threads.get(), "batch_tokens": batch_tokens})
        };
        let curve: Vec<PointV1> = points.iter().map(PointV1::from).collect();
        let choices: Vec<SettingsV1> = tuned.choices.iter().map(SettingsV1::from).collect();
        let quality: Vec<QualityV1> =
            qualities.iter().map(|(precision, quality)| QualityV1::new(*precision, quality)).collect();
        let gains: Vec<Value> = gains
            .iter()
            .map(|Gain { before, after, tokens_per_second_before, tokens_per_second_after }| {
                json!({"before": setting(before), "after": setting(after), "tokens_per_second": {
                    "before": tokens_per_second_before.round(), "after": tokens_per_second_after.round(),
                }})
            })
            .collect();
        json!({
            "model": tuned.source, "digest": tuned.digest, "hardware": tuned.hardware, "settings": choices,
            "recommended_precision": self.recommended().map(Precision::as_str), "quality": quality, "curve": curve, "gains": gains,
            "file": file, "plot": plot, "seconds": took.as_secs_f64(),
            "cpu_share_of_other_processes": others_share.ok(),
            "cpu_share_unknown": others_share.err().map(|reason| reason.to_string()),
        })
    }

    /// Returns the precision that is worth configuring: the fastest, unless it is the default.
    fn recommended(&self) -> Option<Precision> {
        let fastest = self.tuned.choices.first().map(|choice| choice.precision);
        fastest.filter(|precision| *precision != Precision::F32)
    }

    fn is_chosen(&self, setting: &Setting) -> bool {
        self.tuned.choices.iter().any(|choice| {
            let TunedChoice { precision, threads, batch, .. } = choice;
            (*precision, *threads, batch.batch_tokens)
                == (setting.precision, setting.threads, setting.batch_tokens)
        })
    }
}

fn is_sufficient_for(
    qualities: &[(replica_core::Precision, Quality)],
    precision: replica_core::Precision,
) -> bool {
    qualities.iter().any(|(of, quality)| *of == precision && quality.is_sufficient())
}

fn sentence(choice: &TunedChoice) -> String {
    let TunedChoice { precision, threads, batch, tokens_per_second, target_met } = choice;
    let target = match target_met {
        Some(false) => "; the target cannot be met, this comes closest",
        Some(true) => "; meets the target",
        None => "",
    };
    format!(
        "{precision}: {threads} threads, {} tokens per batch, {} while interactive requests wait, batching delay \
         {:.2} ms: {tokens_per_second:.0} tokens/s{target}\n",
        batch.batch_tokens,
        batch.interactive_batch_tokens,
        millis(batch.window_max),
    )
}

fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
