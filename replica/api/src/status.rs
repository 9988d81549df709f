//! `GET /status`: load and state of a replica, which its region polls many times a second.

use serde::{Deserialize, Serialize};

use super::identity::IdentityV1;
use super::start_failure::StartFailureReport;

/// Lifecycle state of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateV1 {
    /// The model is being downloaded or loaded.
    Starting,
    /// It accepts requests.
    Ready,
    /// It finishes requests in flight and accepts no new ones.
    Draining,
    /// A state that only a later version knows. Such a replica gets no requests until it is ready.
    #[serde(other)]
    Other,
}

/// Response of `GET /status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusV1 {
    /// Version of the format: 1.
    pub version: u32,
    /// Random number that the process has drawn at its start: another one is another process. Absent from replicas that
    /// do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<u64>,
    /// Deployments that this replica serves.
    pub names: Vec<String>,
    /// Model of the deployments, as configured.
    pub model: String,
    /// Identity of the loaded model. Absent while it is being loaded, and from replicas that do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<IdentityV1>,
    /// Lifecycle state.
    pub state: StateV1,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Queued tokens of interactive requests: the backlog of a new interactive request, besides the batch that is being
    /// computed. Absent from replicas that do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interactive_tokens: Option<u64>,
    /// Inputs that are queued or being computed.
    pub pending_inputs: u64,
    /// Inference requests since the start, rejected ones included.
    pub requests_total: u64,
    /// Measured speed of the engine; 0 until it is known.
    pub tokens_per_second: f64,
    /// Progress of a start that downloads the model. Absent from other replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub download: Option<DownloadV1>,
    /// Reason why the replica does not become ready. It tries again by itself; absent once a further try makes progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<StartFailureReport>,
}

/// Names of the phases of a download, as in [`DownloadV1::phase`]. Replicas of later versions may report other ones.
pub mod phase {
    /// Another process on the machine pulls the same model; the replica waits for it.
    pub const WAITING: &str = "waiting for another pull";
    /// The replica requests the versions and files of the model.
    pub const RESOLVING: &str = "resolving";
    /// The files are being downloaded.
    pub const DOWNLOADING: &str = "downloading";
    /// The files are being unpacked.
    pub const UNPACKING: &str = "unpacking";
}

/// Progress of the download of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DownloadV1 {
    /// [Phase](phase) in words: `downloading`, `waiting for another pull`.
    pub phase: String,
    /// Bytes of the model that are on disk, those of earlier tries included.
    #[serde(default)]
    pub done_bytes: u64,
    /// Bytes of the model, once they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Remaining time of the download in milliseconds, once its speed is known. The time to load the model is not
    /// included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
}

impl DownloadV1 {
    /// Returns whether the replica waits for another process on its machine that pulls the same model.
    pub fn waits_for_pull(&self) -> bool {
        self.phase == phase::WAITING
    }
}

#[cfg(test)]
mod tests {
    use super::super::start_failure::StartFailure;
    use super::*;

    #[test]
    fn a_state_of_a_later_version_is_read_and_is_not_that_of_a_ready_replica() {
        let text = |state: &str| {
            format!(
                r#"{{"version":1,"names":["m"],"model":"m","state":"{state}","pending_tokens":0,"pending_inputs":0,
                    "requests_total":0,"tokens_per_second":0.0,"temperature":7}}"#
            )
        };
        let read = |state| serde_json::from_str::<StatusV1>(&text(state)).unwrap().state;
        let states = ["starting", "ready", "draining", "warming_up"].map(read);
        assert_eq!(states, [StateV1::Starting, StateV1::Ready, StateV1::Draining, StateV1::Other]);
    }

    #[test]
    fn only_the_phase_of_a_waiting_replica_waits_and_one_of_a_later_version_is_read() {
        let waits = |phase: &str| {
            let text = format!(r#"{{"phase":"{phase}","host":"h"}}"#);
            serde_json::from_str::<DownloadV1>(&text).unwrap().waits_for_pull()
        };
        // The text is that of replicas of earlier versions, too.
        assert!(waits("waiting for another pull") && waits(phase::WAITING));
        for other in [phase::RESOLVING, phase::DOWNLOADING, phase::UNPACKING, "loading", "verifying"] {
            assert!(!waits(other), "{other}");
        }
    }

    #[test]
    fn a_status_of_a_replica_without_a_boot_id_or_identity_is_read() {
        let text = r#"{"version":1,"names":["m"],"model":"m","state":"ready","pending_tokens":0,"pending_inputs":0,
                       "requests_total":0,"tokens_per_second":0.0}"#;
        let older: StatusV1 = serde_json::from_str(text).unwrap();
        assert_eq!((older.boot_id, older.identity.is_none(), older.interactive_tokens), (None, true, None));
        assert_eq!((&older.download, &older.failure), (&None, &None));
        let download = DownloadV1 {
            phase: "downloading".to_owned(),
            done_bytes: 1,
            total_bytes: Some(2),
            left_ms: None,
        };
        let failure = StartFailureReport::new(StartFailure::DiskFull, "the disk is full");
        let (download, failure) = (Some(download), Some(failure));
        let status = StatusV1 { boot_id: Some(u64::MAX), download, failure, ..older };
        let text = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<StatusV1>(&text).unwrap(), status);
    }
}
