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
    FOUND_ATTEMPTS_MAX, FoundRequestV1, FoundRequestsV1, KeptReason, RequestFilter, problem_text,
};
use scheduler_api::usage::UsageDay;
use serde::Deserialize;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

/// Period of a file.
const FILE_PERIOD_MS: u64 = 3_600_000;
/// Size at which the next file is begun within the hour: a search reads one file at a time into memory.
pub const FILE_BYTES_MAX: u64 = 16 << 20;
/// Prefix of the names of files.
const PREFIX: &str = "explanations-";
/// Format of the lines that this version writes and reads. It is raised with a change that an earlier version would misread; fields that
/// it ignores raise nothing.
pub const ARCHIVE_FORMAT: u32 = 1;
/// Part of the names of files before the format. Format 1 is not named.
const FORMAT_PREFIX: &str = ".v";
/// Suffix of the names of files.
const SUFFIX: &str = ".jsonl";
/// Digits of the time in the name of a file: enough until the year 2286, so that the names sort by time.
const TIME_DIGITS: usize = 13;

/// Limits and rules of the archive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArchiveRules {
    /// Maximum bytes of all files.
    pub bytes_max: u64,
    /// Hours for which explanations are kept at least, unless there are too many bytes. Whole files are deleted, so the first
    /// explanations of a file are kept for up to one hour more.
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
        if reason.is_at_will() { of_tenant / 2 } else { of_tenant }
    }

    /// Returns whether the next line belongs into a new file.
    pub fn needs_next_file(&self, current: &ArchiveFile, bytes: u64, now_ms: u64) -> bool {
        current.began_ms / FILE_PERIOD_MS != now_ms / FILE_PERIOD_MS || bytes >= FILE_BYTES_MAX
    }

    /// Returns the files to delete, of all files in order of time: first those that are too old or dated in the future, then the
    /// oldest ones beyond the limit of bytes. The current one is never deleted.
    ///
    /// A file dated in the future was written while the clock was wrong. It would count as the newest one until then, so that files
    /// with the right time would be deleted before it. A file that is dated less than its period ahead may be due to a small
    /// correction of the clock, and stays.
    pub fn surplus(
        &self,
        files: &[FileOnDisk],
        current: Option<&ArchiveFile>,
        now_ms: u64,
    ) -> Vec<ArchiveFile> {
        let age_ms = u64::from(self.hours) * FILE_PERIOD_MS;
        let is_invalid = |file: &ArchiveFile| {
            // The last line of a file may be from the end of its hour.
            let is_old = file.began_ms.saturating_add(FILE_PERIOD_MS + age_ms) <= now_ms;
            is_old || file.began_ms > now_ms.saturating_add(FILE_PERIOD_MS)
        };
        let others = files.iter().filter(|it| Some(&it.file) != current);
        let (invalid, valid): (Vec<_>, Vec<_>) = others.partition(|it| is_invalid(&it.file));
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        bytes = bytes.saturating_sub(invalid.iter().map(|file| file.bytes).sum());
        let mut surplus: Vec<_> = invalid.into_iter().map(|it| it.file.clone()).collect();
        for FileOnDisk { file, bytes: of_file } in valid {
            if bytes <= self.bytes_max {
                break;
            }
            bytes = bytes.saturating_sub(*of_file);
            surplus.push(file.clone());
        }
        surplus
    }
}

/// Bytes of lines by tenant; those without one are of requests that were not authenticated.
pub type TenantBytes = BTreeMap<Option<TenantId>, u64>;

/// Bytes that each tenant has used in the current hour.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HourlyQuota {
    hour: u64,
    used: TenantBytes,
}

impl HourlyQuota {
    /// Returns whether the tenant may use more in this hour, besides the lines of `batch`, which are not written yet.
    pub fn admits(
        &mut self,
        rules: &ArchiveRules,
        (tenant, reason): (Option<&TenantId>, KeptReason),
        batch: &TenantBytes,
        now_ms: u64,
    ) -> bool {
        let hour = now_ms / FILE_PERIOD_MS;
        if self.hour != hour {
            *self = HourlyQuota { hour, used: TenantBytes::new() };
        }
        let tenant = tenant.cloned();
        let of_tenant = |bytes: &TenantBytes| bytes.get(&tenant).copied().unwrap_or(0);
        of_tenant(&self.used).saturating_add(of_tenant(batch)) < rules.quota(reason)
    }

    /// Counts the lines of a batch that was written.
    pub fn count(&mut self, batch: TenantBytes) {
        for (tenant, bytes) in batch {
            let used = self.used.entry(tenant).or_default();
            *used = used.saturating_add(bytes);
        }
    }
}

/// File of explanations. Its order is that of time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArchiveFile {
    /// Begin, in milliseconds since 1970.
    pub began_ms: u64,
    /// Random number of the process that writes it.
    pub process: u64,
    /// Format of its lines.
    pub format: u32,
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
        let ArchiveFile { began_ms, process, format } = self;
        let format = if *format == 1 { String::new() } else { format!("{FORMAT_PREFIX}{format}") };
        format!("{PREFIX}{began_ms:0TIME_DIGITS$}-{process:016x}{format}{SUFFIX}")
    }

    /// Parses a name; `None` for other files.
    pub fn parse(name: &str) -> Option<ArchiveFile> {
        let (began, rest) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once('-')?;
        let (process, format) = rest.split_once(FORMAT_PREFIX).unwrap_or((rest, "1"));
        let file = ArchiveFile {
            began_ms: began.parse().ok()?,
            process: u64::from_str_radix(process, 16).ok()?,
            format: format.parse().ok()?,
        };
        (file.name() == name).then_some(file)
    }

    /// Returns why a file of a later version cannot be read.
    pub fn problem(&self) -> Option<String> {
        let (name, format) = (self.name(), self.format);
        (format > ARCHIVE_FORMAT).then(|| {
            format!(
                "{name} has format {format} of a later version, and this is version {}, which reads format {ARCHIVE_FORMAT}; \
                 search for later requests, or use the version that wrote it",
                env!("CARGO_PKG_VERSION")
            )
        })
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
    /// Name of a [`KeptReason`], or of one that only a newer version has.
    #[serde(borrow)]
    kept: Cow<'a, str>,
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
            && kept.is_none_or(|kept| kept.as_str() == self.kept)
    }

    fn found(self) -> FoundRequestV1 {
        let attempts = self.attempts.into_iter().take(FOUND_ATTEMPTS_MAX);
        FoundRequestV1 {
            id: Some(self.id.into_owned()),
            at_ms: self.at_ms,
            kept: self.kept.into_owned(),
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

/// Sorts files, which are in order of time, from the newest to the oldest. Each has a bound of the time at which its last request
/// ended: the process that wrote it writes to one file at a time.
pub fn newest_first(files: Vec<FileOnDisk>) -> Vec<(FileOnDisk, u64)> {
    let mut next_began: BTreeMap<u64, u64> = BTreeMap::new();
    let with_end = |file: FileOnDisk| {
        let ArchiveFile { began_ms, process, format: _ } = file.file;
        let next = next_began.insert(process, began_ms).unwrap_or(u64::MAX);
        (file, next.min(began_ms.saturating_add(FILE_PERIOD_MS)))
    };
    files.into_iter().rev().map(with_end).collect()
}

/// Formats a time as RFC 3339, to the second.
pub fn time_text(at_ms: u64) -> String {
    let at = Duration::from_millis(at_ms);
    let seconds = at.as_secs();
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{}T{hours:02}:{minutes:02}:{:02}Z", UsageDay::at(at), seconds % 60)
}

/// Search, which reads files from the newest to the oldest, and keeps the newest requests by their arrival.
///
/// Lines are in the order in which requests have ended. The result is in the order of arrival, so that the arrival of its last row is
/// where a search for older ones continues.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArchiveSearch {
    /// Found requests by arrival; of the same arrival the one that was read first is newer. With each, whether its residency is
    /// restricted.
    found: BTreeMap<(u64, Reverse<usize>), (FoundRequestV1, bool)>,
    /// Number of requests that have matched.
    matched: usize,
    has_more: bool,
    problem: Option<String>,
}

impl ArchiveSearch {
    /// Searches a file.
    pub fn read(&mut self, content: &[u8], filter: &RequestFilter) {
        for line in content.rsplit(|byte| *byte == b'\n') {
            // An invalid line is that of a process that was killed.
            let Ok(line) = serde_json::from_slice::<KeptLine<'_>>(line) else { continue };
            if line.matches(filter) {
                self.add(line, filter.limit);
            }
        }
    }

    fn add(&mut self, line: KeptLine<'_>, limit: usize) {
        self.matched += 1;
        let key = (line.at_ms, Reverse(self.matched));
        let is_full = self.found.len() >= limit;
        self.has_more |= is_full;
        if is_full && self.found.first_key_value().is_some_and(|(oldest, _)| key < *oldest) {
            return;
        }
        let is_restricted = line.is_restricted;
        self.found.insert(key, (line.found(), is_restricted));
        if is_full {
            self.found.pop_first();
        }
    }

    /// Returns whether the result needs an older file, whose requests had ended at `ended_ms`.
    pub fn needs(&self, ended_ms: u64, filter: &RequestFilter) -> bool {
        let is_full = self.found.len() >= filter.limit && self.has_more;
        let oldest = self.found.first_key_value().map(|((at_ms, _), _)| *at_ms);
        !is_full || oldest.is_none_or(|oldest| oldest < ended_ms)
    }

    /// Records why some requests were not read. The first reason counts.
    pub fn set_problem(&mut self, problem: impl Display) {
        self.has_more = true;
        self.problem.get_or_insert_with(|| problem_text(problem));
    }

    /// Returns the requests, the newest first, and whether the residency of each is restricted.
    pub fn end(self) -> (FoundRequestsV1, Vec<bool>) {
        let ArchiveSearch { found, matched: _, has_more, problem } = self;
        let (requests, restricted) = found.into_values().rev().unzip();
        (FoundRequestsV1 { requests, has_more, is_enabled: true, problem }, restricted)
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
