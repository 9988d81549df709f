//! Span: record of one operation of a trace.
//!
//! Names of spans and attributes are closed sets; those of OpenTelemetry's semantic conventions where they exist, and
//! `meridian.*` otherwise. Values are numbers, words of closed sets, and identifiers. None of them is an input of a model, a
//! key, or a header of a client other than its request identifier.

use crate::context::{SpanId, TraceContext, TraceId};

/// Maximum number of links of a span: the requests of a batch. A batch of more has the links of the first ones.
pub const LINKS_MAX: usize = 128;
/// Longest text of an attribute, in bytes; longer text is cut. The longest identifier has 128.
pub const TEXT_BYTES_MAX: usize = 256;

/// Name of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanName {
    /// Request that a process received.
    Request {
        /// HTTP method.
        method: &'static str,
        /// Path of the endpoint; a template where the path has parameters.
        route: &'static str,
    },
    /// Gateway: authentication, rate limits, and reading of the body.
    Admission,
    /// Gateway: routing decision and admission to a pool.
    Route,
    /// Attempt at a region, or at a replica.
    Attempt,
    /// Gateway: sending of the response to the client.
    Respond,
    /// Spoke: reading of the body, and checks of residency.
    Receive,
    /// Spoke: selection of a replica.
    Select,
    /// Spoke: wait for a replica to become ready.
    Hold,
    /// Replica: reading and parsing of the body.
    Parse,
    /// Replica: tokenization.
    Tokenize,
    /// Replica: wait of a request in the queue. Spoke: wait of a job, from its submission to its first attempt.
    Queue,
    /// Replica: computation of the batches with inputs of the request.
    Engine,
    /// Replica: writing of the response.
    Write,
    /// Replica: batch of inputs of several requests. It is a trace of its own with links to them.
    Batch,
    /// Replica: step of a batch before the layers: its tokens are packed, and tables are prepared.
    Pack,
    /// Replica: step of a batch in which all layers are computed.
    Forward,
    /// Replica: step of a batch in which the rows of its sequences are made from the states of the last layer.
    Pool,
    /// Spoke: job, from its submission to its end. It is the root of a trace of its own.
    Job,
    /// Spoke: batch of a file, from its creation to its end. It is the root of a trace of its own.
    FileBatch,
    /// Spoke: acceptance of a job, until it is durable.
    Accept,
    /// Spoke: attempt to compute a job, or a chunk of a batch of a file.
    JobAttempt,
    /// Spoke: request of such an attempt, to replicas of its region or to another region.
    JobRequest,
    /// Spoke: attempt to deliver a result to a webhook.
    Webhook,
}

impl SpanName {
    /// Returns the text of the name.
    pub fn text(self) -> std::borrow::Cow<'static, str> {
        match self {
            SpanName::Request { method, route } => format!("{method} {route}").into(),
            SpanName::Admission => "admission".into(),
            SpanName::Route => "route".into(),
            SpanName::Attempt => "attempt".into(),
            SpanName::Respond => "respond".into(),
            SpanName::Receive => "receive".into(),
            SpanName::Select => "select replica".into(),
            SpanName::Hold => "hold".into(),
            SpanName::Parse => "parse".into(),
            SpanName::Tokenize => "tokenize".into(),
            SpanName::Queue => "queue".into(),
            SpanName::Engine => "engine".into(),
            SpanName::Write => "write".into(),
            SpanName::Batch => "batch".into(),
            SpanName::Pack => "pack".into(),
            SpanName::Forward => "forward".into(),
            SpanName::Pool => "pool".into(),
            SpanName::Job => "job".into(),
            SpanName::FileBatch => "file batch".into(),
            SpanName::Accept => "accept".into(),
            SpanName::JobAttempt => "job attempt".into(),
            SpanName::JobRequest => "job request".into(),
            SpanName::Webhook => "webhook".into(),
        }
    }
}

/// Role of a span in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// Within a process.
    Internal,
    /// Receipt of a request.
    Server,
    /// Sending of a request.
    Client,
}

/// Declares the attributes with their names and descriptions.
macro_rules! attributes {
    ($($(#[doc = $about:literal])+ $attribute:ident = $name:literal,)+) => {
        /// Attribute of a span.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Attribute { $($(#[doc = $about])+ $attribute,)+ }

        impl Attribute {
            /// All attributes.
            pub const ALL: &[Attribute] = &[$(Attribute::$attribute),+];

            /// Returns the name.
            pub fn as_str(self) -> &'static str {
                match self { $(Attribute::$attribute => $name),+ }
            }

            /// Returns the description.
            pub fn about(self) -> &'static str {
                match self { $(Attribute::$attribute => concat!($($about),+).trim_ascii_start()),+ }
            }
        }
    };
}

attributes! {
    /// HTTP method.
    HttpMethod = "http.request.method",
    /// Status of the response.
    HttpStatus = "http.response.status_code",
    /// Path of the endpoint, without the values of its parameters.
    HttpRoute = "http.route",
    /// Number of earlier attempts.
    HttpResendCount = "http.request.resend_count",
    /// HTTP version of the client's connection.
    NetworkProtocolVersion = "network.protocol.version",
    /// Path of the endpoint, without the values of its parameters.
    UrlPath = "url.path",
    /// Gateway: `https` if the TLS connection of the client ended there, else `http`.
    UrlScheme = "url.scheme",
    /// Host of the spoke or replica that an attempt was sent to.
    ServerAddress = "server.address",
    /// Its port.
    ServerPort = "server.port",
    /// Error code, or the failure of an attempt.
    ErrorType = "error.type",
    /// Operation: `embeddings`, `rerank`, `score`, `classify`, `tokenize`.
    GenAiOperation = "gen_ai.operation.name",
    /// Gateway: `meridian`, of a request with an operation.
    GenAiProvider = "gen_ai.provider.name",
    /// Deployment.
    GenAiModel = "gen_ai.request.model",
    /// Tokens of the inputs as computed; those of a cached row count too.
    GenAiInputTokens = "gen_ai.usage.input_tokens",
    /// Region that an attempt was sent to, or that served the request.
    CloudRegion = "cloud.region",
    /// Cloud of that region.
    CloudProvider = "cloud.provider",
    /// Identifier of the request, as in logs and in `x-request-id`.
    RequestId = "meridian.request.id",
    /// Tenant.
    Tenant = "meridian.tenant",
    /// Priority: `interactive`, `bulk`.
    Priority = "meridian.priority",
    /// Residency policy.
    Residency = "meridian.residency",
    /// Number of inputs.
    Inputs = "meridian.inputs",
    /// Tokens as estimated by the gateway.
    TokensEstimated = "meridian.tokens_estimated",
    /// Number of attempts.
    Attempts = "meridian.attempts",
    /// Number of parts of a split request.
    Parts = "meridian.parts",
    /// Outcome of the request, as in its log line; of a job its status.
    Outcome = "meridian.outcome",
    /// Reason why the trace was exported: `sampled`, `error`, `failed_over`, `disconnected`, `slow`.
    KeepReason = "meridian.trace.kept",
    /// Number of candidate regions.
    Candidates = "meridian.route.candidates",
    /// Number of regions that are no candidates.
    RejectedRegions = "meridian.route.rejected",
    /// Region with the first rank.
    PrimaryRegion = "meridian.route.primary",
    /// Region that the request spilled over to.
    SpilloverRegion = "meridian.route.spillover",
    /// Number of the attempt, from 1.
    AttemptNumber = "meridian.attempt.number",
    /// Cause of the attempt: `first`, `spillover`, `replay`, `retry`, `first_byte_timeout`, `evacuation`, `hedge`.
    AttemptCause = "meridian.attempt.cause",
    /// End of the attempt.
    AttemptEnd = "meridian.attempt.end",
    /// Spoke of the attempt.
    Spoke = "meridian.spoke",
    /// Time of the cold start that a held request waited for, in milliseconds.
    ColdStartMs = "meridian.cold_start_ms",
    /// Inputs whose rows were in the cache.
    CachedInputs = "meridian.cached_inputs",
    /// Number of batches with inputs of the request.
    Batches = "meridian.batches",
    /// Inputs of the batch.
    BatchInputs = "meridian.batch.inputs",
    /// Tokens of the batch.
    BatchTokens = "meridian.batch.tokens",
    /// Number of requests with inputs in the batch.
    BatchRequests = "meridian.batch.requests",
    /// Identifier of the job, or of the batch of a file, as clients have it.
    JobId = "meridian.job.id",
    /// Index of the chunk of a batch of a file, from 0.
    JobChunk = "meridian.job.chunk",
    /// Other region that computed an attempt at a job.
    TargetRegion = "meridian.job.target_region",
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue {
    /// Number.
    Number(u64),
    /// Word of a closed set.
    Word(&'static str),
    /// Identifier.
    Text(Box<str>),
}

impl From<u64> for AttributeValue {
    fn from(number: u64) -> AttributeValue {
        AttributeValue::Number(number)
    }
}

impl From<&'static str> for AttributeValue {
    fn from(word: &'static str) -> AttributeValue {
        AttributeValue::Word(word)
    }
}

impl AttributeValue {
    /// Returns an identifier as a value, cut to [`TEXT_BYTES_MAX`].
    pub fn text(identifier: &str) -> AttributeValue {
        let end = identifier.floor_char_boundary(TEXT_BYTES_MAX);
        AttributeValue::Text(identifier[..end].into())
    }
}

/// Record of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanRecord {
    /// Trace.
    pub trace: TraceId,
    /// Identifier.
    pub id: SpanId,
    /// Span of which this one is a part.
    pub parent: Option<SpanId>,
    /// Whether the parent is in another process.
    pub is_parent_remote: bool,
    /// Name.
    pub name: SpanName,
    /// Role in a call.
    pub kind: SpanKind,
    /// Start in nanoseconds since 1970.
    pub start_ns: u64,
    /// End in nanoseconds since 1970.
    pub end_ns: u64,
    /// Whether the operation failed.
    pub is_error: bool,
    /// Attributes.
    pub attributes: Vec<(Attribute, AttributeValue)>,
    /// Spans of other traces that this one belongs to, at most [`LINKS_MAX`].
    pub links: Vec<TraceContext>,
}

impl SpanRecord {
    /// Creates a span within a process, without attributes, with its start and its end in nanoseconds since 1970.
    pub fn new(
        trace: TraceId,
        (id, parent): (SpanId, Option<SpanId>),
        name: SpanName,
        (start_ns, end_ns): (u64, u64),
    ) -> SpanRecord {
        SpanRecord {
            trace,
            id,
            parent,
            is_parent_remote: false,
            name,
            kind: SpanKind::Internal,
            start_ns,
            end_ns: end_ns.max(start_ns),
            is_error: false,
            attributes: Vec::new(),
            links: Vec::new(),
        }
    }

    /// Adds a link to a span of another trace, if there is one.
    #[must_use]
    pub fn linked(mut self, to: Option<TraceContext>) -> SpanRecord {
        self.links.extend(to);
        self
    }

    /// Adds an attribute.
    #[must_use]
    pub fn with(mut self, attribute: Attribute, value: impl Into<AttributeValue>) -> SpanRecord {
        // Most spans with attributes have about ten of them.
        if self.attributes.capacity() == 0 {
            self.attributes.reserve_exact(12);
        }
        self.attributes.push((attribute, value.into()));
        self
    }

    /// Adds an identifier, if there is one.
    #[must_use]
    pub fn with_text(mut self, attribute: Attribute, identifier: Option<&str>) -> SpanRecord {
        self.attributes.extend(identifier.map(|text| (attribute, AttributeValue::text(text))));
        self
    }

    /// Adds a number, if there is one.
    #[must_use]
    pub fn with_number(mut self, attribute: Attribute, number: Option<u64>) -> SpanRecord {
        self.attributes.extend(number.map(|number| (attribute, number.into())));
        self
    }

    /// Adds a word of a closed set, if there is one.
    #[must_use]
    pub fn with_word(mut self, attribute: Attribute, word: Option<&'static str>) -> SpanRecord {
        self.attributes.extend(word.map(|word| (attribute, word.into())));
        self
    }

    /// Sets the role in a call.
    #[must_use]
    pub fn of_kind(mut self, kind: SpanKind) -> SpanRecord {
        self.kind = kind;
        self
    }

    /// Marks the operation as failed, with the error.
    #[must_use]
    pub fn failed(mut self, error: Option<&'static str>) -> SpanRecord {
        self.is_error |= error.is_some();
        self.with_word(Attribute::ErrorType, error)
    }
}

/// Returns the table of the attributes for the documentation, in Markdown.
pub fn attributes_table() -> String {
    let mut table = String::from("| attribute | value |\n|---|---|\n");
    for attribute in Attribute::ALL {
        table.push_str(&format!("| `{}` | {} |\n", attribute.as_str(), attribute.about()));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_its_limit() {
        let text = |length: usize| AttributeValue::text(&"é".repeat(length / 2));
        let length = |value: AttributeValue| match value {
            AttributeValue::Text(text) => text.len(),
            AttributeValue::Number(_) | AttributeValue::Word(_) => 0,
        };
        assert_eq!(length(text(TEXT_BYTES_MAX)), TEXT_BYTES_MAX, "at the limit");
        assert_eq!(length(text(TEXT_BYTES_MAX + 2)), TEXT_BYTES_MAX, "past it");
        let odd = format!("x{}", "é".repeat(TEXT_BYTES_MAX));
        assert_eq!(length(AttributeValue::text(&odd)), TEXT_BYTES_MAX - 1, "between characters");
    }

    #[test]
    fn every_attribute_has_a_name_of_its_own() {
        let mut names: Vec<_> = Attribute::ALL.iter().map(|attribute| attribute.as_str()).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(attributes_table().contains("| `gen_ai.request.model` | Deployment. |"));
    }
}
