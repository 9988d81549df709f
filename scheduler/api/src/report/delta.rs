//! Reports as changes since a state that the gateway has.
//!
//! ```text
//!  gateway                                spoke
//!  "known": state 7 ────────────────────▶ compares its loads with those of its last state
//!  applies the changes, compares ◀─────── state 9: changes since 7, removed names, checksum of all loads
//!  the checksum; has state 9
//! ```
//!
//! A report then costs as much as has changed, whatever is deployed. The spoke keeps one history for all gateways: the
//! number of the state in which each load changed last. Changes are absolute values, so those since an earlier state
//! can be applied to a later one, as happens while several requests are in flight. A gateway without a state, or with
//! one that the spoke does not know (it restarted, or forgot removed names), receives all loads. So does a gateway
//! whose checksum differs.
//!
//! Grants belong to one gateway and not to the state. They have a number that increases whenever one of them changes, and
//! the spoke keeps for each gateway the number with which each of its grants changed last. A gateway names the grants that
//! it has; the others are renewed without being repeated. Without a number, the report has all grants. A load whose grant
//! has not been sent has none. A second checksum is that of the grants of the gateway. While nothing changes, the numbers
//! stay, and so does everything that a message repeats ([`super::stream`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::{
    DeploymentLoad, GATEWAYS_MAX, Gateway, KnownState, Report, ReportStateV1, ReportV1, SpokeReport,
    ready_in_ms,
};
use crate::{FNV_BASIS, WireError, fnv1a, parsed};
use regions::DeploymentName;
use regions::deployment::MAX_DEPLOYMENTS;

/// Speeds are reported in multiples of this, in tokens per second. Its multiples are equal after a round trip through
/// JSON, which checksums need; and a speed that is measured anew with the same result is no change.
const SPEED_UNIT: f64 = 0.25;
/// Maximum speed that is reported. Its digits are a number below 2^53, so that reading them as JSON is exact. Those of a
/// larger one are not, and a load that has changed on the way would fail the checksum of every report.
pub(super) const SPEED_MAX: f64 = 90_071_992_547_409.75;

/// Age of the loads from which a report needs new ones: a tenth of the report interval. With many gateways the loads of all
/// deployments would otherwise be computed hundreds of times a second.
pub const LOADS_AGE_MAX: Duration = Duration::from_millis(20);

/// Reports to others after which the grants of a silent gateway are forgotten: sixteen to each of the maximum number.
const SILENT_REPORTS_MAX: u64 = 16 * GATEWAYS_MAX as u64;

/// Why a report was not applied. Except after an outdated one, the next request names no state, so that its response
/// has all loads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// The report is invalid.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// The gateway does not have the state that the report continues, for example after its restart. It requests all
    /// loads.
    #[error("the report has changes since state {base}, which this gateway does not have")]
    UnknownBase {
        /// Number of the state.
        base: u64,
    },
    /// The report is older than the last one, because the spoke has processed two requests in another order than they
    /// were sent. It is ignored.
    #[error("the report has state {number}, and this gateway has state {newer} already")]
    Outdated {
        /// Number of the state, or of the grants.
        number: u64,
        /// Number of those that this gateway has and keeps.
        newer: u64,
    },
    /// The changes in a report give other loads than the spoke has: it has another version, or a defect.
    #[error("the loads after the changes of state {number} differ from those of the spoke")]
    Checksum {
        /// Number of the state.
        number: u64,
    },
    /// The changes in a report give other grants than the spoke has given: it has another version, or a defect.
    #[error("the grants after the changes of state {number} differ from those of the spoke")]
    GrantsChecksum {
        /// Number of the state.
        number: u64,
    },
}

/// Encoder of one spoke's reports. All gateways share the loads, which are computed at most once per [`LOADS_AGE_MAX`].
#[derive(Debug, Default)]
pub struct ReportEncoder {
    /// Loads, and the names that were removed.
    loads: BTreeMap<DeploymentName, VersionedLoad>,
    /// Deployments by the state in which each changed last.
    changes: BTreeMap<u64, BTreeSet<DeploymentName>>,
    /// Number of removed names.
    removed: usize,
    /// Number of the newest state.
    number: u64,
    /// Oldest state since which all removed names are known.
    oldest: u64,
    checksum: u64,
    /// Time of the newest loads.
    loaded_at: Option<Instant>,
    /// Grants of each gateway.
    granted: BTreeMap<Gateway, SentGrants>,
    /// Number of the newest grants.
    grants: u64,
    /// Number of reports so far.
    reports: u64,
}

/// Last change of a load.
#[derive(Debug)]
struct VersionedLoad {
    /// None: the name has been removed.
    load: Option<DeploymentLoad>,
    /// State since which it is so.
    changed: u64,
}

/// Grants of one gateway that have been sent.
#[derive(Debug, Default)]
struct SentGrants {
    /// Numbers of the first and the newest grants of this history.
    first: u64,
    newest: u64,
    /// Number of the last report to the gateway.
    reported: u64,
    /// Grants, also those that have become 0, with the number with which each changed last.
    each: BTreeMap<DeploymentName, (u64, u64)>,
    /// Checksum of the grants that are not 0.
    checksum: u64,
}

impl SentGrants {
    /// Records the current grants; those that have changed get the number `next`. Returns whether there are any.
    fn update(
        &mut self,
        grants: &BTreeMap<DeploymentName, u64>,
        next: u64,
        is_served: impl Fn(&DeploymentName) -> bool,
    ) -> bool {
        let mut sum = self.checksum;
        let mut is_changed = false;
        // A gateway that removes a deployment removes its grant as well.
        self.each.retain(|name, (tokens, _)| {
            let stays = is_served(name);
            if !stays {
                sum = sum.wrapping_sub(grant_checksum(name, *tokens));
                is_changed |= *tokens > 0;
            }
            stays
        });
        for (name, sent) in &mut self.each {
            let tokens = grants.get(name).copied().unwrap_or(0);
            if sent.0 != tokens {
                sum =
                    sum.wrapping_sub(grant_checksum(name, sent.0)).wrapping_add(grant_checksum(name, tokens));
                *sent = (tokens, next);
                is_changed = true;
            }
        }
        for (name, tokens) in grants.iter().filter(|(name, tokens)| **tokens > 0 && is_served(name)) {
            if !self.each.contains_key(name) {
                sum = sum.wrapping_add(grant_checksum(name, *tokens));
                self.each.insert(name.clone(), (*tokens, next));
                is_changed = true;
            }
        }
        self.checksum = sum;
        if is_changed {
            self.newest = next;
        }
        is_changed
    }

    /// Returns the tokens of a grant.
    fn tokens(&self, name: &DeploymentName) -> u64 {
        self.each.get(name).map_or(0, |(tokens, _)| *tokens)
    }
}

impl ReportEncoder {
    /// Returns whether the loads are so old that the next report needs new ones.
    pub fn needs_loads(&self, now: Instant) -> bool {
        self.loaded_at.is_none_or(|at| now.saturating_duration_since(at) >= LOADS_AGE_MAX)
    }

    /// Begins a new state if any of these loads, computed at `now`, has changed. Loads that are older than the known ones
    /// are ignored.
    pub fn update(&mut self, loads: BTreeMap<DeploymentName, DeploymentLoad>, now: Instant) {
        if self.loaded_at.is_some_and(|at| now < at) {
            return;
        }
        self.loaded_at = Some(now);
        let next = self.number + 1;
        let is_gone = |(name, known): (&DeploymentName, &VersionedLoad)| {
            (known.load.is_some() && !loads.contains_key(name)).then(|| name.clone())
        };
        for name in self.loads.iter().filter_map(is_gone).collect::<Vec<_>>() {
            self.change(name, None, next);
        }
        for (name, mut load) in loads {
            round(&mut load);
            if self.loads.get(&name).is_none_or(|known| known.load != Some(load)) {
                self.change(name, Some(load), next);
            }
        }
        if self.changes.contains_key(&next) {
            self.number = next;
        }
        if self.removed > MAX_DEPLOYMENTS {
            let changes = &mut self.changes;
            self.loads.retain(|name, known| {
                if known.load.is_none() {
                    forget_change(changes, name, known.changed);
                }
                known.load.is_some()
            });
            (self.removed, self.oldest) = (0, self.number);
        }
    }

    /// Changes the load of a deployment in the state `next`; `None` removes its name.
    fn change(&mut self, name: DeploymentName, load: Option<DeploymentLoad>, next: u64) {
        let sum = |load: &Option<DeploymentLoad>| load.as_ref().map_or(0, |load| load_checksum(&name, load));
        self.checksum = self.checksum.wrapping_add(sum(&load));
        self.removed += usize::from(load.is_none());
        if let Some(before) = self.loads.insert(name.clone(), VersionedLoad { load, changed: next }) {
            self.checksum = self.checksum.wrapping_sub(sum(&before.load));
            self.removed -= usize::from(before.load.is_none());
            forget_change(&mut self.changes, &name, before.changed);
        }
        self.changes.entry(next).or_default().insert(name);
    }

    /// Returns the number of loads and removed names that have changed since the state `known` of a gateway: all of them if the
    /// gateway has no usable state. Not counted are those of which only the grant has changed.
    pub fn changed_loads(&self, known: Option<KnownState>, boot_id: u64) -> usize {
        match self.base(known, boot_id) {
            None => self.loads.len() - self.removed,
            Some(base) => self.changes.range(base.number + 1..).map(|(_, names)| names.len()).sum(),
        }
    }

    /// Returns the state of a gateway if a report can have the changes since it.
    fn base(&self, known: Option<KnownState>, boot_id: u64) -> Option<KnownState> {
        known.filter(|known| known.boot_id == boot_id && (self.oldest..=self.number).contains(&known.number))
    }

    /// Encodes a report for a gateway that has the state `known`.
    pub fn encode(&mut self, report: SpokeReport, gateway: &Gateway, known: Option<KnownState>) -> ReportV1 {
        let SpokeReport { region, instance, boot_id, sequence, draining, has_jobs, grants } = report;
        self.reports += 1;
        let is_new = !self.granted.contains_key(gateway);
        let reports = self.reports;
        if is_new {
            self.granted.retain(|_, sent| reports - sent.reported <= SILENT_REPORTS_MAX);
        }
        if is_new && self.granted.len() >= GATEWAYS_MAX {
            // Each of them receives all its grants once more.
            self.granted.clear();
        }
        let known = self.base(known, boot_id);
        let next = self.grants + 1;
        let sent = self.granted.entry(gateway.clone()).or_insert_with(|| SentGrants {
            first: next,
            newest: next,
            ..SentGrants::default()
        });
        sent.reported = reports;
        let load_of = |name: &DeploymentName| self.loads.get(name)?.load;
        if sent.update(&grants, next, |name| load_of(name).is_some()) || is_new {
            self.grants = next;
        }
        let base = known.map(|known| known.number);
        let grants_base =
            known.and_then(|known| known.grants).filter(|known| (sent.first..=sent.newest).contains(known));
        let mut removed = Vec::new();
        let mut deployments = BTreeMap::new();
        let mut list = |name: &DeploymentName| match load_of(name) {
            Some(load) => {
                let load = DeploymentLoad { granted_tokens: sent.tokens(name), ..load };
                deployments.insert(name.clone(), load);
            }
            None => removed.push(name.to_string()),
        };
        match base {
            None => {
                self.loads.iter().filter(|(_, known)| known.load.is_some()).for_each(|(name, _)| list(name))
            }
            Some(base) => {
                self.changes.range(base + 1..).flat_map(|(_, names)| names).for_each(&mut list);
                let is_new_grant = |(tokens, changed): &(u64, u64)| match grants_base {
                    Some(base) => *changed > base,
                    None => *tokens > 0,
                };
                let new_grants = sent.each.iter().filter(|(_, grant)| is_new_grant(grant));
                new_grants.for_each(|(name, _)| list(name));
            }
        }
        removed.sort_unstable();
        let report = Report { region, instance, boot_id, sequence, deployments, draining, has_jobs };
        let (checksum, grants, grants_checksum) = (self.checksum, Some(sent.newest), Some(sent.checksum));
        let number = self.number;
        let state = ReportStateV1 { number, base, removed, checksum, grants, grants_base, grants_checksum };
        ReportV1 { state: Some(state), ..ReportV1::from(report) }
    }
}

/// Removes the change of a deployment in the state `at`.
fn forget_change(changes: &mut BTreeMap<u64, BTreeSet<DeploymentName>>, name: &DeploymentName, at: u64) {
    if let Some(names) = changes.get_mut(&at) {
        names.remove(name);
        if names.is_empty() {
            changes.remove(&at);
        }
    }
}

/// Decoder of the reports of one spoke at one gateway.
#[derive(Debug, Default)]
pub struct ReportDecoder {
    /// Last report with all its loads and grants.
    last: Option<DecodedReport>,
}

/// Report with all its loads and grants.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodedReport {
    /// The report.
    pub report: Report,
    /// Deployments whose load or grant differs from the report before, or that were removed. `None`: any may differ.
    pub changed: Option<BTreeSet<DeploymentName>>,
    /// Deployments with a grant.
    granted: BTreeSet<DeploymentName>,
    /// Number of its state.
    number: u64,
    checksum: u64,
    /// Number of its grants, if the spoke numbers them.
    grants: Option<u64>,
    grants_checksum: u64,
}

impl DecodedReport {
    /// Returns a report of which any load may have changed.
    pub fn of_all_loads(report: Report) -> DecodedReport {
        let granted = report.deployments.iter().filter(|(_, load)| load.granted_tokens > 0);
        let granted = granted.map(|(name, _)| name.clone()).collect();
        let checksum = checksum(report.deployments.iter());
        let grants = report.deployments.iter().map(|(name, load)| grant_checksum(name, load.granted_tokens));
        let grants_checksum = grants.fold(0, u64::wrapping_add);
        DecodedReport { report, changed: None, granted, number: 0, checksum, grants: None, grants_checksum }
    }

    /// Replaces the load of a deployment; `None` removes it.
    fn change(&mut self, name: DeploymentName, load: Option<DeploymentLoad>) {
        let sum = |load: &DeploymentLoad| load_checksum(&name, load);
        let grant = |load: &DeploymentLoad| grant_checksum(&name, load.granted_tokens);
        self.checksum = self.checksum.wrapping_add(load.as_ref().map_or(0, sum));
        self.grants_checksum = self.grants_checksum.wrapping_add(load.as_ref().map_or(0, grant));
        match load.is_some_and(|load| load.granted_tokens > 0) {
            true => self.granted.insert(name.clone()),
            false => self.granted.remove(&name),
        };
        let before = match load {
            Some(load) => self.report.deployments.insert(name.clone(), load),
            None => self.report.deployments.remove(&name),
        };
        self.checksum = self.checksum.wrapping_sub(before.as_ref().map_or(0, sum));
        self.grants_checksum = self.grants_checksum.wrapping_sub(before.as_ref().map_or(0, grant));
        if let Some(changed) = &mut self.changed {
            changed.insert(name);
        }
    }
}

impl ReportDecoder {
    /// Returns the state that this gateway has, for the next request.
    pub fn known(&self) -> Option<KnownState> {
        let DecodedReport { report, number, grants, .. } = self.last.as_ref()?;
        Some(KnownState { boot_id: report.boot_id, number: *number, grants: *grants })
    }

    /// Decodes a report. Reports must be decoded in the order of their sequence numbers; late ones are left out.
    pub fn decode(&mut self, mut wire: ReportV1) -> Result<&DecodedReport, ReportError> {
        let before = self.last.take();
        let state = wire.state.take();
        let mut report = Report::try_from(wire)?;
        let Some(ReportStateV1 { number, base, removed, checksum, grants, grants_base, grants_checksum }) =
            state
        else {
            // A spoke without states always sends all loads. Its reports are no state to refer to.
            return Ok(self.last.insert(DecodedReport::of_all_loads(report)));
        };
        let before = before.filter(|last| last.report.boot_id == report.boot_id);
        if let Some(last) = &before {
            let newer_state = (number < last.number).then_some((number, last.number));
            let earlier_grants = grants.zip(last.grants).filter(|(number, newer)| number < newer);
            if let Some((number, newer)) = newer_state.or(earlier_grants) {
                self.last = before;
                return Err(ReportError::Outdated { number, newer });
            }
        }
        let decoded = match base {
            None => DecodedReport::of_all_loads(report),
            Some(base) => {
                let mut last =
                    before.filter(|last| last.number >= base).ok_or(ReportError::UnknownBase { base })?;
                let has_base = |base: &u64| last.grants.is_some_and(|grants| grants >= *base);
                if let Some(base) = grants_base.filter(|base| !has_base(base)) {
                    return Err(ReportError::UnknownBase { base });
                }
                let changed = std::mem::take(&mut report.deployments);
                report.deployments = std::mem::take(&mut last.report.deployments);
                (last.report, last.changed) = (report, Some(BTreeSet::new()));
                if grants_base.is_none() {
                    for name in std::mem::take(&mut last.granted) {
                        let load = last.report.deployments.get(&name).copied();
                        last.change(name, load.map(|load| DeploymentLoad { granted_tokens: 0, ..load }));
                    }
                }
                changed.into_iter().for_each(|(name, load)| last.change(name, Some(load)));
                for (at, name) in removed.iter().enumerate() {
                    last.change(parsed(format!("state.removed[{at}]"), name)?, None);
                }
                let all = last.report.deployments.len();
                if all > MAX_DEPLOYMENTS {
                    let problem = format!("{all} with these changes; at most {MAX_DEPLOYMENTS}");
                    return Err(WireError::new("deployments", problem).into());
                }
                last
            }
        };
        if decoded.checksum != checksum {
            return Err(ReportError::Checksum { number });
        }
        if grants_checksum.is_some_and(|sent| sent != decoded.grants_checksum) {
            return Err(ReportError::GrantsChecksum { number });
        }
        Ok(self.last.insert(DecodedReport { number, grants, ..decoded }))
    }
}

/// Rounds a load to what is equal after a round trip through JSON. A known speed stays known, that is, above 0, and one that
/// is no number becomes unknown.
fn round(load: &mut DeploymentLoad) {
    let speed = load.tokens_per_second;
    let rounded = (speed / SPEED_UNIT).round() * SPEED_UNIT;
    load.tokens_per_second = if speed > 0.0 { rounded.clamp(SPEED_UNIT, SPEED_MAX) } else { 0.0 };
    load.ready_in = load.ready_in.map(|left| Duration::from_millis(ready_in_ms(left)));
}

/// Checksum of all loads without their grants: a sum, so that it does not depend on an order.
fn checksum<'a>(loads: impl Iterator<Item = (&'a DeploymentName, &'a DeploymentLoad)>) -> u64 {
    loads.fold(0, |sum: u64, (name, load)| sum.wrapping_add(load_checksum(name, load)))
}

/// FNV-1a of a name and its grant; 0 without a grant, so that a grant that has ended is none. Summed like the loads.
fn grant_checksum(name: &DeploymentName, tokens: u64) -> u64 {
    if tokens == 0 {
        return 0;
    }
    fnv1a(FNV_BASIS, name.as_str().bytes().chain(tokens.to_le_bytes()))
}

/// FNV-1a of a name and its load. It detects defects, not forgery: the connection authenticates both ends.
fn load_checksum(name: &DeploymentName, load: &DeploymentLoad) -> u64 {
    let DeploymentLoad {
        ready,
        ready_in,
        pending_tokens,
        interactive_tokens,
        tokens_per_second,
        granted_tokens: _,
        // A gateway that does not know the field must compute the same checksum.
        failed: _,
    } = load;
    // An absent value differs from every present one.
    let optional = |value: Option<u64>| value.map_or(0, |value| value.wrapping_add(1));
    let ready_in = ready_in.map(ready_in_ms);
    let numbers = [
        u64::from(*ready),
        optional(ready_in),
        *pending_tokens,
        optional(*interactive_tokens),
        tokens_per_second.to_bits(),
    ];
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    fnv1a(FNV_BASIS, name.as_str().bytes().chain(numbers))
}

#[cfg(test)]
mod tests;
