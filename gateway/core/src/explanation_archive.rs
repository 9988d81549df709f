//! Explanations that a gateway keeps on disk: which requests, for how long, and which of them match a filter.
//!
//! ```text
//!  finished request ──reason──▶ HourlyQuota ──▶ line of the current file, one for each hour ──▶ search
//!                                                   │
//!                                                   └─ surplus: the oldest files are deleted
//! ```
//!
//! A line is the explanation as `GET /explain/ID` has it, with the reason. Files are independent of each other: a process begins
//! its own, so two processes during a handover do not write to the same, and a line that a killed process has not completed is
//! the last one of its file and is skipped.
//!
//! Clients cause requests of most reasons, so a tenant has a quota for each hour: what one tenant causes does not displace the
//! explanations of the others. The time and the random draw are arguments.

use regions::id::TenantId;
use scheduler_api::requests::{
    FOUND_ATTEMPTS_MAX, FoundRequestV1, FoundRequestsV1, KeptReason, RequestFilter,
};
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

/// Period of a file.
const FILE_PERIOD_MS: u64 = 3_600_000;
/// Size at which the next file is begun within the hour: a search reads one file at a time into memory.
pub const FILE_BYTES_MAX: u64 = 16 << 20;
/// Prefix of the names of files.
const PREFIX: &str = "explanations-";
/// Suffix of the names of files.
const SUFFIX: &str = ".jsonl";
/// Digits of the time in the name of a file: enough until the year 2286, so that the names sort by time.
const TIME_DIGITS: usize = 13;

/// Limits and rules of the archive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArchiveRules {
    /// Maximum bytes of all files.
    pub bytes_max: u64,
    /// Hours for which explanations are kept.
    pub hours: u32,
    /// Duration from which a request is slow.
    pub slow: Duration,
    /// Share of the other requests that is kept, from 0 to 1.
    pub sample_ratio: f64,
}

/// Facts about a request when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedRequest {
    /// It failed by no fault of the client.
    pub is_failed: bool,
    /// It was rejected by a fault of an authenticated client, or over a limit of its tenant.
    pub is_rejected: bool,
    /// It was sent again after a failure, a timeout or the loss of a region.
    pub is_failed_over: bool,
    /// Its trace was sampled.
    pub is_sampled: bool,
    /// Its duration.
    pub total: Duration,
}

impl ArchiveRules {
    /// Returns the reason to keep the explanation of a request. `draw` is uniform from 0 to 1.
    pub fn reason(&self, ended: &EndedRequest, draw: f64) -> Option<KeptReason> {
        match ended {
            EndedRequest { is_failed: true, .. } => Some(KeptReason::Failed),
            EndedRequest { is_failed_over: true, .. } => Some(KeptReason::FailedOver),
            EndedRequest { total, .. } if *total >= self.slow => Some(KeptReason::Slow),
            EndedRequest { is_rejected: true, .. } => Some(KeptReason::Rejected),
            EndedRequest { is_sampled, .. } if *is_sampled || draw < self.sample_ratio => {
                Some(KeptReason::Sampled)
            }
            EndedRequest { .. } => None,
        }
    }

    /// Returns the bytes that a tenant may use in an hour: half of the share of an hour, and half of that for requests that the
    /// tenant causes at will.
    fn quota(&self, reason: KeptReason) -> u64 {
        let of_tenant = self.bytes_max / u64::from(self.hours.max(1)) / 2;
        match reason {
            KeptReason::Failed | KeptReason::FailedOver | KeptReason::Slow => of_tenant,
            KeptReason::Rejected | KeptReason::Sampled => of_tenant / 2,
        }
    }

    /// Returns whether the next line belongs into a new file.
    pub fn needs_next_file(&self, current: &ArchiveFile, bytes: u64, now_ms: u64) -> bool {
        current.began_ms / FILE_PERIOD_MS != now_ms / FILE_PERIOD_MS || bytes >= FILE_BYTES_MAX
    }

    /// Returns the files to delete, of all files in order of time: those that have become too old, and the oldest ones beyond the
    /// limit of bytes. The current one is never deleted.
    pub fn surplus(
        &self,
        files: &[FileOnDisk],
        current: Option<&ArchiveFile>,
        now_ms: u64,
    ) -> Vec<ArchiveFile> {
        let age_ms = u64::from(self.hours) * FILE_PERIOD_MS;
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let mut surplus = Vec::new();
        for FileOnDisk { file, bytes: of_file } in files.iter().filter(|it| Some(&it.file) != current) {
            // Its last line may be from the end of its hour.
            let is_old = file.began_ms.saturating_add(FILE_PERIOD_MS + age_ms) <= now_ms;
            if is_old || bytes > self.bytes_max {
                bytes = bytes.saturating_sub(*of_file);
                surplus.push(file.clone());
            }
        }
        surplus
    }
}

/// Bytes that each tenant has used in the current hour.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HourlyQuota {
    hour: u64,
    /// By tenant; those without one are the requests that were not authenticated.
    used: BTreeMap<Option<TenantId>, u64>,
}

impl HourlyQuota {
    /// Returns whether the tenant may use more in this hour.
    pub fn admits(
        &mut self,
        rules: &ArchiveRules,
        tenant: Option<&TenantId>,
        reason: KeptReason,
        now_ms: u64,
    ) -> bool {
        let hour = now_ms / FILE_PERIOD_MS;
        if self.hour != hour {
            *self = HourlyQuota { hour, used: BTreeMap::new() };
        }
        let used = self.used.get(&tenant.cloned()).copied().unwrap_or(0);
        used < rules.quota(reason)
    }

    /// Counts the bytes of a line.
    pub fn count(&mut self, tenant: Option<&TenantId>, bytes: u64) {
        let used = self.used.entry(tenant.cloned()).or_default();
        *used = used.saturating_add(bytes);
    }
}

/// File of explanations. Its order is that of time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArchiveFile {
    /// Begin, in milliseconds since 1970.
    pub began_ms: u64,
    /// Random number of the process that writes it.
    pub process: u64,
}

/// File of explanations, with its size.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileOnDisk {
    /// The file.
    pub file: ArchiveFile,
    /// Its size.
    pub bytes: u64,
}

impl ArchiveFile {
    /// Returns the name of the file.
    pub fn name(&self) -> String {
        let ArchiveFile { began_ms, process } = self;
        format!("{PREFIX}{began_ms:0TIME_DIGITS$}-{process:016x}{SUFFIX}")
    }

    /// Parses a name; `None` for other files.
    pub fn parse(name: &str) -> Option<ArchiveFile> {
        let (began, process) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once('-')?;
        let file =
            ArchiveFile { began_ms: began.parse().ok()?, process: u64::from_str_radix(process, 16).ok()? };
        (file.name() == name).then_some(file)
    }

    /// Returns whether requests that match the filter may be in it: the file has those that have ended within its hour.
    pub fn may_have(&self, filter: &RequestFilter, longest_ms: u64) -> bool {
        let arrived_from = self.began_ms.saturating_sub(longest_ms);
        let arrived_to = self.began_ms.saturating_add(FILE_PERIOD_MS);
        arrived_from < filter.until_ms && filter.since_ms <= arrived_to
    }
}

/// Fields of a line that a search needs. The others are not parsed.
#[derive(Deserialize)]
struct KeptLine<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    at_ms: u64,
    kept: KeptReason,
    is_restricted: bool,
    #[serde(borrow)]
    tenant: Option<Cow<'a, str>>,
    #[serde(borrow)]
    deployment: Option<Cow<'a, str>>,
    #[serde(borrow)]
    region: Option<Cow<'a, str>>,
    status: Option<u16>,
    #[serde(borrow)]
    outcome: Cow<'a, str>,
    total_ms: f64,
    #[serde(borrow)]
    attempts: Vec<KeptAttempt<'a>>,
}

#[derive(Deserialize)]
struct KeptAttempt<'a> {
    #[serde(borrow)]
    region: Cow<'a, str>,
}

impl KeptLine<'_> {
    fn matches(&self, filter: &RequestFilter) -> bool {
        let RequestFilter { tenant, deployment, region, status, outcome, kept, since_ms, until_ms, limit: _ } =
            filter;
        let is = |wanted: Option<&str>, found: Option<&str>| wanted.is_none() || wanted == found;
        let is_in = |region: &str| {
            self.region.as_deref() == Some(region)
                || self.attempts.iter().any(|attempt| attempt.region == region)
        };
        (*since_ms..*until_ms).contains(&self.at_ms)
            && is(tenant.as_ref().map(TenantId::as_str), self.tenant.as_deref())
            && is(deployment.as_ref().map(|name| name.as_str()), self.deployment.as_deref())
            && region.as_ref().is_none_or(|region| is_in(region.as_str()))
            && status.is_none_or(|status| status.matches(self.status))
            && is(outcome.as_deref(), Some(&self.outcome))
            && kept.is_none_or(|kept| kept == self.kept)
    }

    fn found(self) -> FoundRequestV1 {
        let attempts = self.attempts.into_iter().take(FOUND_ATTEMPTS_MAX);
        FoundRequestV1 {
            id: Some(self.id.into_owned()),
            at_ms: self.at_ms,
            kept: self.kept,
            tenant: self.tenant.map(Cow::into_owned),
            deployment: self.deployment.map(Cow::into_owned),
            region: self.region.map(Cow::into_owned),
            status: self.status,
            outcome: self.outcome.into_owned(),
            total_ms: self.total_ms,
            attempts: attempts.map(|attempt| attempt.region.into_owned()).collect(),
        }
    }
}

/// Search, which reads files from the newest to the oldest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArchiveSearch {
    /// Found requests, and whether the residency of each is restricted.
    found: Vec<(FoundRequestV1, bool)>,
    has_more: bool,
}

impl ArchiveSearch {
    /// Searches a file. Returns whether older ones are needed.
    pub fn read(&mut self, content: &[u8], filter: &RequestFilter) -> bool {
        for line in content.rsplit(|byte| *byte == b'\n') {
            // An invalid line is that of a process that was killed.
            let Ok(line) = serde_json::from_slice::<KeptLine<'_>>(line) else { continue };
            if !line.matches(filter) {
                continue;
            }
            if self.found.len() == filter.limit {
                self.has_more = true;
                return false;
            }
            let is_restricted = line.is_restricted;
            self.found.push((line.found(), is_restricted));
        }
        true
    }

    /// Ends the search before all files were read.
    pub fn interrupt(&mut self) {
        self.has_more = true;
    }

    /// Returns the requests, the newest first, and whether the residency of each is restricted.
    pub fn end(mut self) -> (FoundRequestsV1, Vec<bool>) {
        self.found.sort_by_key(|(request, _)| std::cmp::Reverse(request.at_ms));
        let (requests, restricted) = self.found.into_iter().unzip();
        (FoundRequestsV1 { requests, has_more: self.has_more, is_enabled: true }, restricted)
    }
}

/// Returns the newest line with this identifier in a file.
pub fn find<'c>(content: &'c [u8], id: &str) -> Option<&'c [u8]> {
    let field = format!("\"id\":{}", serde_json::Value::from(id));
    let lines = memchr::memmem::rfind_iter(content, field.as_bytes()).map(|at| {
        let (before, after) = content.split_at(at);
        let from = memchr::memrchr(b'\n', before).map_or(0, |end| end + 1);
        let to = memchr::memchr(b'\n', after).map_or(content.len(), |end| at + end);
        content.get(from..to).unwrap_or_default()
    });
    // The text may also be a part of another field.
    let is_of = |line: &&[u8]| serde_json::from_slice::<KeptLine<'_>>(line).is_ok_and(|line| line.id == id);
    lines.into_iter().find(is_of)
}

#[cfg(test)]
mod tests;
