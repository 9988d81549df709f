//! Rendering of [`Metrics`] as `/metrics`: our metrics first, then TEI's.

use replica_api::error::ErrorCode;
use replica_api::priority::Priority;
use replica_core::batch::PriorityLoad;
use replica_core::cost::BatchCost;

use super::text::ExpositionText;
use crate::engine::Statistics;
use supervision::panics::{self, Scope};

use super::{AtomicCounter, Distribution, Metrics, PriorityMetrics, ReplicaGauges, RequestStage};

/// Field of the load of a priority.
type LoadField = fn(&PriorityLoad) -> u64;
/// Histogram of a priority.
type HistogramField = fn(&PriorityMetrics) -> &Distribution;

impl Metrics {
    /// Renders all metrics in the Prometheus text format.
    pub fn render(&self) -> String {
        let mut text = ExpositionText::default();
        self.render_requests(&mut text);
        render_panics(&mut text);
        self.render_queue(&mut text);
        self.render_batches(&mut text);
        self.render_engine(&mut text);
        self.render_cache(&mut text);
        self.render_tei(&mut text);
        text.finish()
    }

    fn render_requests(&self, text: &mut ExpositionText) {
        let name = "meridian_replica_requests_total";
        text.head(name, "counter", "Requests that ended, by route and error code.");
        for ((route, code), n) in self.outcomes.read() {
            let code = code.map_or("ok", ErrorCode::as_str);
            text.sample(name, &[("route", route.as_str()), ("code", code)], n);
        }
        let single = [
            ("inputs_total", "Inputs of successful requests.", &self.inputs),
            ("tokens_total", "Tokens of successful requests.", &self.tokens),
            ("inputs_dropped_total", "Inputs cancelled before they were computed.", &self.dropped_inputs),
            (
                "inputs_deduplicated_total",
                "Inputs that shared the work of an equal input in the queue.",
                &self.deduplicated_inputs,
            ),
        ];
        for (name, help, counter) in single {
            text.single(&format!("meridian_replica_{name}"), "counter", help, counter.get());
        }
        let name = "meridian_replica_requests_shed_total";
        text.head(name, "counter", "Requests rejected because the queue was full.");
        for (priority, n) in self.shed.read() {
            text.sample(name, &[("priority", priority.as_str())], n);
        }
        let name = "meridian_replica_stage_seconds";
        text.head(name, "histogram", "Duration of the stages of successful requests.");
        for stage in RequestStage::ALL {
            for priority in Priority::ALL {
                let snapshot = self.priorities.of(priority).stages[stage as usize].read();
                text.histogram(
                    name,
                    &[("stage", stage.as_str()), ("priority", priority.as_str())],
                    &snapshot,
                );
            }
        }
    }

    fn render_queue(&self, text: &mut ExpositionText) {
        let ReplicaGauges { loads, cost, tokens_per_second, .. } = self.gauges();
        let depths: [(&str, &str, LoadField); 3] = [
            ("queue_requests", "Requests with inputs in the queue.", |load| load.requests),
            ("queue_inputs", "Inputs in the queue, equal ones counted once.", |load| load.queued.inputs),
            ("queue_tokens", "Tokens of the inputs in the queue.", |load| load.queued.tokens),
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
            ("batch_cost_fixed_seconds", "Estimated fixed cost of a batch.", fixed),
            ("batch_cost_token_seconds", "Estimated cost of each token of a batch.", per_token),
        ];
        for (name, help, value) in single {
            text.single(&format!("meridian_replica_{name}"), "gauge", help, value);
        }
    }

    fn render_batches(&self, text: &mut ExpositionText) {
        let name = "meridian_replica_batches_total";
        text.head(name, "counter", "Batches, by priority and by the reason why the batch was closed.");
        for ((priority, reason), n) in self.batches.read() {
            text.sample(name, &[("priority", priority.as_str()), ("reason", reason.as_str())], n);
        }
        let distributions: [(&str, &str, HistogramField); 3] = [
            ("batch_inputs", "Inputs of a batch.", |priority| &priority.batch_inputs),
            ("batch_tokens", "Tokens of a batch.", |priority| &priority.batch_tokens),
            ("batch_seconds", "Compute time of a batch.", |priority| &priority.batch_seconds),
        ];
        for (name, help, distribution) in distributions {
            let name = format!("meridian_replica_{name}");
            text.head(&name, "histogram", help);
            for priority in Priority::ALL {
                let snapshot = distribution(self.priorities.of(priority)).0.read();
                text.histogram(&name, &[("priority", priority.as_str())], &snapshot);
            }
        }
        let micros = |counter: &AtomicCounter| counter.get() as f64 / 1e6;
        text.single(
            "meridian_replica_padding_saved_tokens_total",
            "counter",
            "Tokens that padding each batch to its longest input would have added.",
            self.padding_saved.get(),
        );
        text.single(
            "meridian_replica_engine_busy_seconds_total",
            "counter",
            "Compute time of the engine.",
            micros(&self.engine_micros),
        );
        text.single(
            "meridian_replica_engine_failures_total",
            "counter",
            "Batches on which the engine failed.",
            self.engine_failures.get(),
        );
        text.single(
            "meridian_replica_window_waits_total",
            "counter",
            "Batches delayed to collect inputs of clients whose previous requests had just completed.",
            self.window_waits.get(),
        );
        text.single(
            "meridian_replica_window_wait_seconds_total",
            "counter",
            "Total batching delay.",
            micros(&self.window_micros),
        );
    }

    /// Renders the description of the engine and, if it has any, its own statistics.
    fn render_engine(&self, text: &mut ExpositionText) {
        if let Some(engine) = self.described.get() {
            let name = "meridian_replica_engine_info";
            text.head(name, "gauge", "Description of the engine; always 1.");
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
            self.gauges().engine
        else {
            return;
        };
        let single = [
            (
                "iterations_total",
                "counter",
                "Iterations of the model, as counted by the runtime.",
                iterations,
            ),
            ("iteration_milliseconds_total", "counter", "Total time of the iterations.", busy_ms),
            ("completed_total", "counter", "Inputs that the runtime computed.", completed),
            (
                "retried_batches_total",
                "counter",
                "Batches that failed and were retried input by input.",
                retried_batches,
            ),
            ("active", "gauge", "Inputs in the last iteration.", active),
            ("queued", "gauge", "Inputs in the queue of the runtime.", queued),
            ("gpu_bytes", "gauge", "GPU memory in use.", gpu_bytes),
        ];
        for (name, kind, help, value) in single {
            text.single(&format!("meridian_replica_engine_{name}"), kind, help, value);
        }
    }

    fn render_cache(&self, text: &mut ExpositionText) {
        let (bytes, rows) = self.gauges().cached;
        let single = [
            ("cache_hits_total", "counter", "Inputs found in the cache of rows.", self.cache_hits.get()),
            (
                "cache_misses_total",
                "counter",
                "Inputs not found in the cache of rows.",
                self.cache_misses.get(),
            ),
            ("cache_evictions_total", "counter", "Rows evicted from the cache.", self.cache_evictions.get()),
            ("cache_bytes", "gauge", "Bytes of the cached rows.", bytes),
            ("cache_rows", "gauge", "Cached inputs.", rows),
        ];
        for (name, kind, help, value) in single {
            text.single(&format!("meridian_replica_{name}"), kind, help, value);
        }
    }

    /// Renders the metrics under TEI's names.
    fn render_tei(&self, text: &mut ExpositionText) {
        let outcomes = self.outcomes.read();
        let successful: u64 = outcomes.iter().filter(|((_, code), _)| code.is_none()).map(|(_, n)| n).sum();
        text.single("te_request_count", "counter", "Requests.", self.requests.get());
        text.single("te_request_success", "counter", "Successful requests.", successful);
        for stage in RequestStage::ALL {
            let snapshot = |priority: Priority| self.priorities.of(priority).stages[stage as usize].read();
            text.head(
                stage.tei(),
                "histogram",
                "Duration of the stage, in seconds; see meridian_replica_stage_seconds.",
            );
            text.histogram(
                stage.tei(),
                &[],
                &snapshot(Priority::Interactive).plus(&snapshot(Priority::Bulk)),
            );
        }
        let sizes: [(&str, HistogramField); 2] = [
            ("te_batch_next_size", |priority| &priority.batch_inputs),
            ("te_batch_next_tokens", |priority| &priority.batch_tokens),
        ];
        for (name, distribution) in sizes {
            let snapshot = |priority: Priority| distribution(self.priorities.of(priority)).0.read();
            text.head(name, "histogram", "Size of each batch.");
            text.histogram(name, &[], &snapshot(Priority::Interactive).plus(&snapshot(Priority::Bulk)));
        }
        let loads = self.gauges().loads;
        let waiting: u64 = Priority::ALL.iter().map(|priority| loads.of(*priority).queued.inputs).sum();
        text.single("te_queue_size", "gauge", "Inputs in the queue.", waiting);
    }
}
/// Renders the contained panics of this process, which [`supervision`] counts.
fn render_panics(text: &mut ExpositionText) {
    let name = "meridian_replica_panics_total";
    text.head(name, "counter", "Contained panics, by scope. Each is a defect; the log has its message.");
    for scope in Scope::ALL {
        text.sample(name, &[("scope", scope.as_str())], panics::contained(scope));
    }
}
