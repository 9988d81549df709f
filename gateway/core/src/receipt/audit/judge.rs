//! Checks of one receipt.

use super::join::{ReceiptSide, Record};
use super::{Audit, FilePosition, Kind, REJECTIONS_LISTED_MAX};
use crate::labels::{AttemptResult, INVALID_HEADER, NOT_RESIDENT_HERE};
use crate::receipt::entry::Entry;
use crate::receipt::{AttemptKey, ReceiptContent};
use regions::residency::ResidencyPolicy;
use regions::set::RegionSet;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Residency policy of a file, with its allowed regions.
pub(super) struct FilePolicy {
    residency: String,
    allowed: BTreeSet<String>,
    /// Whether the allowed regions were compared with the policy.
    judged: bool,
}

/// Outcomes with which a region rejects a request for its residency before it has read the body. The second is that of
/// a policy that cannot be parsed.
const REFUSED: [&str; 2] = [NOT_RESIDENT_HERE, INVALID_HEADER];

/// Attempt, from an entry that is written before it is sent or from one that is written after it has ended.
struct AttemptEntry<'e> {
    id: &'e str,
    request: &'e str,
    attempt: u32,
    tenant: &'e str,
    deployment: &'e str,
    policy: u32,
    region: &'e str,
    at_ms: u64,
    key: Option<&'e str>,
    /// Number of an entry that is written before.
    number: Option<u64>,
    /// Duration in microseconds and result, from an entry that is written after.
    over: Option<(u64, &'e str)>,
}

impl<'e> AttemptEntry<'e> {
    fn of(entry: &'e Entry<'_>) -> AttemptEntry<'e> {
        match entry {
            Entry::Attempt {
                id,
                request,
                attempt,
                tenant,
                deployment,
                policy,
                region,
                at_ms,
                took_us,
                end,
                key,
                ..
            } => AttemptEntry {
                id,
                request,
                attempt: *attempt,
                tenant,
                deployment,
                policy: *policy,
                region,
                at_ms: *at_ms,
                key: key.as_deref(),
                number: None,
                over: Some((*took_us, end)),
            },
            Entry::Sent {
                id,
                number,
                request,
                attempt,
                tenant,
                deployment,
                policy,
                region,
                at_ms,
                key,
                ..
            } => AttemptEntry {
                id,
                request,
                attempt: *attempt,
                tenant,
                deployment,
                policy: *policy,
                region,
                at_ms: *at_ms,
                key: Some(key),
                number: Some(*number),
                over: None,
            },
            other => unreachable!("called with an attempt, not {other:?}"),
        }
    }
}

impl Audit<'_> {
    pub(super) fn policy(
        &mut self,
        number: u32,
        residency: &str,
        allowed: &[Cow<'_, str>],
        at: &mut FilePosition<'_>,
    ) {
        let allowed = allowed.iter().map(|region| region.to_string()).collect();
        at.policies.insert(number, FilePolicy { residency: residency.to_owned(), allowed, judged: false });
        // With a filter, the policy is judged when the first selected receipt refers to it.
        if self.options.filter.is_empty() {
            self.judge_policy(number, at);
        }
    }

    /// Checks once that the allowed regions follow from the policy and the catalogue.
    fn judge_policy(&mut self, number: u32, at: &mut FilePosition<'_>) {
        let Some(policy) = at.policies.get_mut(&number).filter(|policy| !policy.judged) else { return };
        policy.judged = true;
        let (residency, allowed) = (policy.residency.clone(), policy.allowed.clone());
        let Some(permitted) = self.permitted(&residency) else {
            let message = format!("'{residency}' is not a residency policy");
            return self.note(Kind::Unreadable, at, message);
        };
        for region in &allowed {
            let index = region.parse().ok().and_then(|id| self.catalogue.index_of(&id));
            if !index.is_some_and(|index| permitted.contains(index)) {
                let message = format!("'{residency}' does not allow {region}, which it lists as allowed");
                self.note(Kind::AllowedTooWide, at, message);
            }
        }
    }

    /// Checks an attempt, with or without its outcome.
    pub(super) fn attempt(&mut self, entry: &Entry<'_>, at: &mut FilePosition<'_>) {
        let attempt = AttemptEntry::of(entry);
        let Ok(key) = attempt.key.map(str::parse::<AttemptKey>).transpose() else {
            return self.note(Kind::Unreadable, at, "its key is not an attempt key".to_owned());
        };
        let policy = attempt.policy;
        if !at.policies.contains_key(&policy) {
            let message = format!("policy {policy} is not defined before it in this file");
            return self.note(Kind::Unreadable, at, message);
        }
        let over = attempt.over.map(|(took_us, end)| (took_us, AttemptResult::parse(end), end));
        let (took_us, side) = match over {
            None => (0, ReceiptSide::NoResponse),
            Some((took_us, Some(end), _)) if end.has_response() => (took_us, ReceiptSide::Responded),
            Some((took_us, Some(_), _)) => (took_us, ReceiptSide::NoResponse),
            Some((_, None, end)) => {
                return self.note(Kind::Unreadable, at, format!("'{end}' is not a result of an attempt"));
            }
        };
        let AttemptEntry { tenant, deployment, at_ms, .. } = attempt;
        let selected = self.options.filter.selects(Some(tenant), Some(deployment), at_ms);
        if selected {
            self.judge_policy(policy, at);
            self.check_region(&attempt, at);
        }
        self.check_receipt_id(&attempt, key, at);
        self.options.receipts.remove(attempt.id);
        self.record_time(at, at_ms + took_us / 1000);
        // An entry whose fsync failed may exist all the same, and is then written again in full at the end.
        let sent = key.filter(|_| over.is_some()).and_then(|key| self.chain(at).open.remove(&key.number));
        if let Some(index) = sent {
            return self.join.ended(index, took_us, side == ReceiptSide::Responded);
        }
        self.attempts += u64::from(selected);
        let record = Record {
            request: attempt.request.into(),
            attempt: attempt.attempt,
            region: self.join.name(attempt.region),
            key,
            side,
            policy: self.join.name(&at.policies[&policy].residency),
            until_ms: at_ms + took_us / 1000,
            selected,
        };
        let index = self.join.add(record);
        if let Some(number) = attempt.number {
            self.chain(at).open.insert(number, index);
        }
    }

    /// Checks that the policy of an attempt allows its region.
    fn check_region(&mut self, attempt: &AttemptEntry<'_>, at: &FilePosition<'_>) {
        let AttemptEntry { request, attempt, region, policy, .. } = attempt;
        let FilePolicy { residency, allowed, .. } = &at.policies[policy];
        if !allowed.contains(*region) {
            let message = format!(
                "request {request}, attempt {attempt}, was sent to {region}, which '{residency}' does not allow"
            );
            self.note(Kind::ResidencyViolation, at, message);
        }
    }

    /// Checks that the identifier of a receipt is that of its content.
    fn check_receipt_id(
        &mut self,
        attempt: &AttemptEntry<'_>,
        key: Option<AttemptKey>,
        at: &FilePosition<'_>,
    ) {
        let content = ReceiptContent {
            chain: &at.chain,
            request: attempt.request,
            attempt: attempt.attempt,
            region: attempt.region,
            residency: &at.policies[&attempt.policy].residency,
            at_ms: attempt.at_ms,
            key,
        };
        let id = attempt.id;
        if content.id().to_string() != id {
            self.note(Kind::WrongReceiptId, at, format!("receipt {id} does not match its content"));
        }
    }

    /// Checks an arrival, with or without its outcome.
    pub(super) fn arrival(&mut self, entry: &Entry<'_>, at: &FilePosition<'_>) {
        let (common, number, took_us, outcome) = match entry {
            Entry::Arrival {
                request,
                attempt,
                tenant,
                deployment,
                residency,
                at_ms,
                took_us,
                outcome,
                key,
            } => (
                (request, attempt, tenant, deployment, residency, at_ms, key),
                None,
                *took_us,
                Some(&**outcome),
            ),
            Entry::Received { number, request, attempt, tenant, deployment, residency, at_ms, key } => {
                ((request, attempt, tenant, deployment, residency, at_ms, key), Some(*number), 0, None)
            }
            other => unreachable!("called with an arrival, not {other:?}"),
        };
        let (request, attempt, tenant, deployment, residency, at_ms, key) = common;
        let Ok(key) = key.as_deref().map(str::parse::<AttemptKey>).transpose() else {
            return self.note(Kind::Unreadable, at, "its key is not an attempt key".to_owned());
        };
        let selected = self.options.filter.selects(tenant.as_deref(), deployment.as_deref(), *at_ms);
        self.arrivals += u64::from(selected);
        self.record_time(at, at_ms + took_us / 1000);
        let region = self.chain(at).summary.region.clone();
        let here = region.parse().ok().and_then(|id| self.catalogue.index_of(&id));
        let permits =
            self.permitted(residency).zip(here).is_some_and(|(permitted, here)| permitted.contains(here));
        let refused = match outcome {
            Some(NOT_RESIDENT_HERE) => true,
            Some(outcome) => !permits && REFUSED.contains(&outcome),
            None => false,
        };
        if selected && refused {
            self.refused += 1;
            if self.refusals.len() < REJECTIONS_LISTED_MAX {
                let outcome = outcome.unwrap_or_default();
                self.refusals.push(format!(
                    "{}:{}: request {request}, attempt {attempt}, arrived in {region} under '{residency}' and was rejected \
                     ({outcome})",
                    at.file, at.line
                ));
            }
        } else if selected && !permits {
            let message = format!(
                "request {request}, attempt {attempt}, was accepted in {region}, which '{residency}' does not allow"
            );
            self.note(Kind::ResidencyViolation, at, message);
        }
        let record = Record {
            request: (&**request).into(),
            attempt: *attempt,
            region: self.join.name(&region),
            key,
            side: ReceiptSide::Arrived,
            policy: self.join.name(residency),
            until_ms: at_ms + took_us / 1000,
            selected,
        };
        let index = self.join.add(record);
        if let Some(number) = number {
            self.chain(at).open.insert(number, index);
        }
    }

    /// Applies the outcome of an earlier entry of the chain.
    pub(super) fn outcome(&mut self, number: u64, took_us: u64, end: &str, at: &FilePosition<'_>) {
        let Some(index) = self.chain(at).open.remove(&number) else {
            // Its start may be in a file that was archived.
            if !self.options.partial {
                let message =
                    format!("it is the outcome of entry {number}, which is not before it in this chain");
                self.note(Kind::OutcomeWithoutAttempt, at, message);
            }
            return;
        };
        self.join.ended(index, took_us, AttemptResult::parse(end).is_some_and(AttemptResult::has_response));
    }

    fn permitted(&mut self, residency: &str) -> Option<RegionSet> {
        if let Some(known) = self.permitted.get(residency) {
            return *known;
        }
        let policy = residency.parse::<ResidencyPolicy>().ok();
        let permitted = policy.map(|policy| policy.permitted(self.catalogue));
        self.permitted.insert(residency.to_owned(), permitted);
        permitted
    }

    fn chain(&mut self, at: &FilePosition<'_>) -> &mut super::Chain {
        self.chains.get_mut(&at.chain).expect("a file begins before its lines")
    }
}
