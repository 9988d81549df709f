//! What [`Metrics`] holds, as `/metrics` says it: our names first, then TEI's.

use replica_core::batch::PriorityLoad;
use replica_core::cost::BatchCost;
use replica_core::priority::Priority;
use replica_core::wire::error::ErrorCode;

use super::text::Text;
use crate::engine::Statistics;
use supervision::panics::{self, Scope};

use super::{Counter, Distribution, Metrics, Now, PriorityMetrics, Stage};

/// A part of what a priority holds.
type Depth = fn(&PriorityLoad) -> u64;
/// One of the distributions of a priority.
type Part = fn(&PriorityMetrics) -> &Distribution;

impl Metrics {
    /// Everything, in Prometheus' text format.
    pub fn render(&self) -> String {
        let mut text = Text::default();
        self.render_requests(&mut text);
        render_panics(&mut text);
        self.render_queue(&mut text);
        self.render_batches(&mut text);
        self.render_engine(&mut text);
        self.render_cache(&mut text);
        self.render_tei(&mut text);
        text.finish()
    }

    fn render_requests(&self, text: &mut Text) {
        let name = "meridian_replica_requests_total";
        text.head(name, "counter", "Requests that ended, by path and by error code.");
        for ((route, code), n) in self.outcomes.read() {
            let code = code.map_or("ok", ErrorCode::as_str);
            text.sample(name, &[("route", route.as_str()), ("code", code)], n);
        }
        let single = [
            ("inputs_total", "Inputs answered.", &self.inputs),
            ("tokens_total", "Tokens answered.", &self.tokens),
            ("inputs_dropped_total", "Inputs that nobody waited for any more.", &self.dropped_inputs),
            (
                "inputs_joined_total",
                "Inputs that shared the work of equal ones in the queue.",
                &self.joined_inputs,
            ),
        ];
        for (name, help, counter) in single {
            text.single(&format!("meridian_replica_{name}"), "counter", help, counter.get());
        }
        let name = "meridian_replica_requests_shed_total";
        text.head(name, "counter", "Requests for which the queue had no room.");
        for (priority, n) in self.shed.read() {
            text.sample(name, &[("priority", priority.as_str())], n);
        }
        let name = "meridian_replica_stage_seconds";
        text.head(name, "histogram", "Where answered requests spent their time.");
        for stage in Stage::ALL {
            for priority in Priority::ALL {
                let reading = self.priorities.of(priority).stages[stage as usize].read();
                text.histogram(name, &[("stage", stage.as_str()), ("priority", priority.as_str())], &reading);
            }
        }
    }

    fn render_queue(&self, text: &mut Text) {
        let Now { loads, cost, tokens_per_second, .. } = self.now();
        let depths: [(&str, &str, Depth); 3] = [
            ("queue_requests", "Requests with inputs that wait.", |load| load.requests),
            ("queue_inputs", "Inputs that wait, equal ones once.", |load| load.queued.inputs),
            ("queue_tokens", "Their tokens.", |load| load.queued.tokens),
        ];
        for (name, help, depth) in depths {
            let name = format!("meridian_replica_{name}");
            text.head(&name, "gauge", help);
            for priority in Priority::ALL {
                text.sample(&name, &[("priority", priority.as_str())], depth(loads.of(priority)));
            }
        }
        let BatchCost { fixed, per_token } = cost.unwrap_or(BatchCost { fixed: 0.0, per_token: 0.0 });
        let single = [
            ("engine_tokens_per_second", "Measured speed of the engine.", tokens_per_second),
            ("batch_cost_fixed_seconds", "What a batch costs before its first token, as learnt.", fixed),
            ("batch_cost_token_seconds", "What each token adds, as learnt.", per_token),
        ];
        for (name, help, value) in single {
            text.single(&format!("meridian_replica_{name}"), "gauge", help, value);
        }
    }

    fn render_batches(&self, text: &mut Text) {
        let name = "meridian_replica_batches_total";
        text.head(name, "counter", "Batches, by priority and by why no more was waited for.");
        for ((priority, reason), n) in self.batches.read() {
            text.sample(name, &[("priority", priority.as_str()), ("reason", reason.as_str())], n);
        }
        let distributions: [(&str, &str, Part); 3] = [
            ("batch_inputs", "Inputs of a batch.", |priority| &priority.batch_inputs),
            ("batch_tokens", "Tokens of a batch.", |priority| &priority.batch_tokens),
            ("batch_seconds", "What the engine took for a batch.", |priority| &priority.batch_seconds),
        ];
        for (name, help, distribution) in distributions {
            let name = format!("meridian_replica_{name}");
            text.head(&name, "histogram", help);
            for priority in Priority::ALL {
                let reading = distribution(self.priorities.of(priority)).0.read();
                text.histogram(&name, &[("priority", priority.as_str())], &reading);
            }
        }
        let micros = |counter: &Counter| counter.get() as f64 / 1e6;
        text.single(
            "meridian_replica_padding_saved_tokens_total",
            "counter",
            "Tokens that padding each batch to its longest input would have added.",
            self.padding_saved.get(),
        );
        text.single(
            "meridian_replica_engine_busy_seconds_total",
            "counter",
            "Time in which the engine computed.",
            micros(&self.engine_micros),
        );
        text.single(
            "meridian_replica_engine_failures_total",
            "counter",
            "Batches that the engine failed on.",
            self.engine_failures.get(),
        );
        text.single(
            "meridian_replica_window_waits_total",
            "counter",
            "Times that the engine waited for callers who were just answered.",
            self.window_waits.get(),
        );
        text.single(
            "meridian_replica_window_wait_seconds_total",
            "counter",
            "Time in which it did.",
            micros(&self.window_micros),
        );
    }

    /// What the engine is and, where it counts for itself, what it says.
    fn render_engine(&self, text: &mut Text) {
        if let Some(engine) = self.described.get() {
            let name = "meridian_replica_engine_info";
            text.head(name, "gauge", "1, with what the engine is.");
            let mut labels = vec![("kind", engine.kind.as_str()), ("precision", engine.precision.as_str())];
            if let Some(accelerator) = &engine.accelerator {
                labels.extend([
                    ("gpu", accelerator.gpu.as_str()),
                    ("tensorrt", accelerator.tensorrt.as_str()),
                    ("tensorrt_llm", accelerator.tensorrt_llm.as_str()),
                    ("test_double", if accelerator.test_double { "true" } else { "false" }),
                ]);
            }
            text.sample(name, &labels, 1);
        }
        let Some(Statistics { iterations, busy_ms, completed, retried_batches, active, queued, gpu_bytes }) =
            self.now().engine
        else {
            return;
        };
        let single = [
            ("iterations_total", "counter", "Runs of the model, as the runtime counts them.", iterations),
            ("iteration_milliseconds_total", "counter", "What they took.", busy_ms),
            ("completed_total", "counter", "Inputs that the runtime computed.", completed),
            (
                "retried_batches_total",
                "counter",
                "Batches that failed and were computed one by one.",
                retried_batches,
            ),
            ("active", "gauge", "Inputs in the last run.", active),
            ("queued", "gauge", "Inputs that waited for it in the runtime.", queued),
            ("gpu_bytes", "gauge", "Memory of the GPU in use.", gpu_bytes),
        ];
        for (name, kind, help, value) in single {
            text.single(&format!("meridian_replica_engine_{name}"), kind, help, value);
        }
    }

    fn render_cache(&self, text: &mut Text) {
        let (bytes, rows) = self.now().cached;
        let single = [
            ("cache_hits_total", "counter", "Inputs found in the cache of rows.", self.cache_hits.get()),
            ("cache_misses_total", "counter", "Inputs not found there.", self.cache_misses.get()),
            (
                "cache_evictions_total",
                "counter",
                "Rows that made room for others.",
                self.cache_evictions.get(),
            ),
            ("cache_bytes", "gauge", "Bytes of the cached rows.", bytes),
            ("cache_rows", "gauge", "Cached inputs.", rows),
        ];
        for (name, kind, help, value) in single {
            text.single(&format!("meridian_replica_{name}"), kind, help, value);
        }
    }

    /// What TEI calls the same.
    fn render_tei(&self, text: &mut Text) {
        let outcomes = self.outcomes.read();
        let answered: u64 = outcomes.iter().filter(|((_, code), _)| code.is_none()).map(|(_, n)| n).sum();
        text.single("te_request_count", "counter", "Requests.", self.requests.get());
        text.single("te_request_success", "counter", "Requests answered.", answered);
        for stage in Stage::ALL {
            let reading = |priority: Priority| self.priorities.of(priority).stages[stage as usize].read();
            text.head(stage.tei(), "histogram", "As in meridian_replica_stage_seconds, in seconds.");
            text.histogram(stage.tei(), &[], &reading(Priority::Interactive).plus(&reading(Priority::Bulk)));
        }
        let sizes: [(&str, Part); 2] = [
            ("te_batch_next_size", |priority| &priority.batch_inputs),
            ("te_batch_next_tokens", |priority| &priority.batch_tokens),
        ];
        for (name, distribution) in sizes {
            let reading = |priority: Priority| distribution(self.priorities.of(priority)).0.read();
            text.head(name, "histogram", "Of each batch.");
            text.histogram(name, &[], &reading(Priority::Interactive).plus(&reading(Priority::Bulk)));
        }
        let loads = self.now().loads;
        let waiting: u64 = Priority::ALL.iter().map(|priority| loads.of(*priority).queued.inputs).sum();
        text.single("te_queue_size", "gauge", "Inputs that wait.", waiting);
    }
}
/// Panics of this process, which [`supervision`] counts.
fn render_panics(text: &mut Text) {
    let name = "meridian_replica_panics_total";
    text.head(
        name,
        "counter",
        "Panics that were contained, by where: each is a defect, and its line is in the log.",
    );
    for scope in Scope::ALL {
        text.sample(name, &[("scope", scope.as_str())], panics::contained(scope));
    }
}
