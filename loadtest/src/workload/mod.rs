//! Workloads: content of the requests.
//!
//! An embeddings endpoint serves short search queries, passages for indexing, backfills with hundreds of texts per
//! request for hours, rerank requests with a query and its documents, and texts to classify. Each is a [`WorkloadType`]
//! with its own text lengths, batch size and priority. The texts come from a file or are generated from the seed of the run; they are
//! deterministic.
//!
//! Request bodies are assembled by copying texts that were encoded before the run ([`texts`]).

pub mod expected;
mod input_file;
pub mod texts;
pub mod trace;
pub mod words;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use expected::ExpectedVectors;
use replica_api::api::Operation;
use replica_api::priority::Priority;
use texts::TextSet;
use trace::Trace;

/// Maximum inputs per request, the limit of OpenAI's API.
pub const INPUTS_MAX: usize = 2048;

/// Maximum documents per rerank request, the limit of Cohere's API.
pub const DOCUMENTS_MAX: usize = 1000;

/// Type of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadType {
    /// Search queries of 8 to 16 tokens, one a request.
    Queries,
    /// Paragraphs of 128 tokens, one a request.
    Passages,
    /// Texts of all lengths, log-normal, one a request.
    Mixed,
    /// A backfill: passages in large batches, in the bulk priority.
    Bulk,
    /// Queries with documents to rank.
    Rerank,
    /// Paragraphs of 128 tokens to classify, one a request.
    Classify,
}

impl WorkloadType {
    /// All types.
    pub const ALL: [WorkloadType; 6] = [
        WorkloadType::Queries,
        WorkloadType::Passages,
        WorkloadType::Mixed,
        WorkloadType::Bulk,
        WorkloadType::Rerank,
        WorkloadType::Classify,
    ];

    /// Returns the name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkloadType::Queries => "queries",
            WorkloadType::Passages => "passages",
            WorkloadType::Mixed => "mixed",
            WorkloadType::Bulk => "bulk",
            WorkloadType::Rerank => "rerank",
            WorkloadType::Classify => "classify",
        }
    }

    /// Returns the path of its requests below the base URL.
    pub fn path(self) -> &'static str {
        match self {
            WorkloadType::Queries | WorkloadType::Passages | WorkloadType::Mixed | WorkloadType::Bulk => {
                Operation::Embeddings.definition().path
            }
            WorkloadType::Rerank => Operation::RerankV1.definition().path,
            WorkloadType::Classify => Operation::Classify.definition().path,
        }
    }

    /// Returns the priority of its requests.
    pub fn priority(self) -> Priority {
        match self {
            WorkloadType::Bulk => Priority::Bulk,
            WorkloadType::Queries
            | WorkloadType::Passages
            | WorkloadType::Mixed
            | WorkloadType::Rerank
            | WorkloadType::Classify => Priority::Interactive,
        }
    }

    /// Returns the default number of inputs or documents per request.
    pub fn inputs(self) -> usize {
        match self {
            WorkloadType::Queries | WorkloadType::Passages | WorkloadType::Mixed | WorkloadType::Classify => {
                1
            }
            WorkloadType::Bulk => 128,
            WorkloadType::Rerank => 20,
        }
    }

    /// Returns the maximum number of inputs or documents per request.
    pub fn inputs_max(self) -> usize {
        if self == WorkloadType::Rerank { DOCUMENTS_MAX } else { INPUTS_MAX }
    }

    /// Returns the length distribution of generated texts.
    pub fn lengths(self) -> words::TextLengths {
        match self {
            WorkloadType::Queries => words::TextLengths::Query,
            WorkloadType::Passages | WorkloadType::Bulk | WorkloadType::Rerank | WorkloadType::Classify => {
                words::TextLengths::Passage
            }
            WorkloadType::Mixed => words::TextLengths::Mixed,
        }
    }
}

impl FromStr for WorkloadType {
    type Err = String;

    fn from_str(text: &str) -> Result<WorkloadType, String> {
        let known = WorkloadType::ALL.map(WorkloadType::as_str);
        WorkloadType::ALL
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| format!("unknown workload {text:?}; write one of {}", known.join(", ")))
    }
}

impl fmt::Display for WorkloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Workload of one task.
#[derive(Clone, Debug)]
pub struct TaskWorkload {
    /// Type of the workload.
    pub kind: WorkloadType,
    /// Inputs or documents per request.
    pub inputs: usize,
    /// Texts of the requests.
    pub texts: TextSet,
    /// Queries of rerank requests.
    pub queries: Option<TextSet>,
    /// Expected vectors, if given.
    pub expected: Option<Arc<ExpectedVectors>>,
    /// Recorded request sizes, for a replay.
    pub trace: Option<Trace>,
}

impl TaskWorkload {
    /// Returns the number of rows that the response to request `number` must have.
    pub fn rows(&self, number: u64) -> usize {
        self.trace.as_ref().map_or(self.inputs, |trace| trace.request(number).inputs)
    }

    /// Writes the body of request `number`; `model` is the name of the deployment as a JSON string.
    pub(crate) fn body(&self, number: u64, model: &str, body: &mut Vec<u8>) {
        let rows = self.rows(number);
        let texts = match &self.trace {
            None => &self.texts,
            Some(trace) => trace.texts(number),
        };
        body.extend_from_slice(b"{\"model\":");
        body.extend_from_slice(model.as_bytes());
        match &self.queries {
            None if self.kind == WorkloadType::Classify => body.extend_from_slice(b",\"input\":["),
            None => body.extend_from_slice(b",\"encoding_format\":\"float\",\"input\":["),
            Some(queries) => {
                body.extend_from_slice(b",\"query\":");
                queries.of_request(number, 1).for_each(|query| body.extend_from_slice(query.as_bytes()));
                body.extend_from_slice(b",\"documents\":[");
            }
        }
        for (index, text) in texts.of_request(number, rows).enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.extend_from_slice(text.as_bytes());
        }
        body.extend_from_slice(b"]}");
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::Value;

    pub(crate) fn workload(kind: WorkloadType) -> TaskWorkload {
        let queries =
            (kind == WorkloadType::Rerank).then(|| TextSet::generated(2, words::TextLengths::Query));
        let texts = TextSet::generated(1, kind.lengths());
        TaskWorkload { kind, inputs: kind.inputs(), texts, queries, expected: None, trace: None }
    }

    fn body(workload: &TaskWorkload, number: u64) -> Value {
        let mut body = Vec::new();
        workload.body(number, "\"m\"", &mut body);
        serde_json::from_slice(&body).unwrap()
    }

    #[test]
    fn bodies_match_the_api() {
        for kind in WorkloadType::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
            let body = body(&workload(kind), 3);
            assert_eq!(body["model"], "m", "{kind}");
            let list = if kind == WorkloadType::Rerank { "documents" } else { "input" };
            assert_eq!(body[list].as_array().map(Vec::len), Some(kind.inputs()), "{kind}");
            assert_eq!(body["query"].is_string(), kind == WorkloadType::Rerank, "{kind}");
            let embeds = !matches!(kind, WorkloadType::Rerank | WorkloadType::Classify);
            assert_eq!(body["encoding_format"].is_string(), embeds, "{kind}");
        }
        let problem = "typos".parse::<WorkloadType>().unwrap_err();
        assert!(problem.contains("queries, passages, mixed, bulk, rerank, classify"), "{problem}");
    }

    #[test]
    fn equal_seeds_give_equal_bodies_and_requests_differ() {
        let [one, same] = [workload(WorkloadType::Mixed), workload(WorkloadType::Mixed)];
        assert_eq!(body(&one, 7), body(&same, 7));
        assert_ne!(body(&one, 7), body(&one, 8));
    }
}
