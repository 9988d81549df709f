//! Labels of metrics.

use metrics::{Label, labels, labels_of};
use replica_api::api::{OPERATIONS, Operation};
use replica_api::error::ErrorCode;
use replica_api::priority::Priority;
use replica_api::start_failure::StartFailure;
use replica_core::window::StartReason;

/// Names this crate as the one that makes labels of other crates' enums.
#[derive(Debug)]
pub(crate) struct InReplica;

labels_of!(InReplica: Priority, StartReason, StartFailure);

labels! {
    /// Stage of a request.
    pub(crate) enum RequestStage {
        Tokenize = "tokenize",
        Queue = "queue",
        Engine = "engine",
        Total = "total",
    }
}

/// Route of a request: its path in the table of the API.
impl Label<InReplica> for Operation {
    fn values() -> Vec<&'static str> {
        OPERATIONS.iter().map(|operation| operation.path).collect()
    }

    fn index(self) -> usize {
        self as usize
    }
}

/// Error code of a request; none is `ok`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeLabel(pub(crate) Option<ErrorCode>);

impl CodeLabel {
    pub(crate) const OK: CodeLabel = CodeLabel(None);
}

impl<In> Label<In> for CodeLabel {
    fn values() -> Vec<&'static str> {
        ["ok"].into_iter().chain(ErrorCode::ALL.iter().map(|code| code.as_str())).collect()
    }

    fn index(self) -> usize {
        self.0.map_or(0, |code| 1 + code as usize)
    }
}
