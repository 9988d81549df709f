//! Checks of one receipt.

use super::join::{Record, Side};
use super::{At, Audit, Kind, REFUSALS_TOLD_MAX};
use crate::receipt::entry::Entry;
use crate::receipt::{AttemptKey, Essence};
use crate::words::{Ended, INVALID_HEADER, NOT_RESIDENT_HERE};
use regions::residency::ResidencyPolicy;
use regions::set::RegionSet;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A residency policy of a file, with the regions that could see requests under it.
pub(super) struct Policy {
    residency: String,
    allowed: BTreeSet<String>,
    /// Whether the allowed set was compared with the policy.
    judged: bool,
}

/// Outcomes with which a region refuses a request for its residency before it has read the body. The second is that of a
/// policy which cannot be read.
const REFUSED: [&str; 2] = [NOT_RESIDENT_HERE, INVALID_HEADER];

impl Audit<'_> {
    pub(super) fn policy(&mut self, number: u32, residency: &str, allowed: &[Cow<'_, str>], at: &mut At<'_>) {
        let allowed = allowed.iter().map(|region| region.to_string()).collect();
        at.policies.insert(number, Policy { residency: residency.to_owned(), allowed, judged: false });
        // Where only some receipts are judged, it is when the first of them refers to it.
        if self.demands.filter.is_empty() {
            self.judge_policy(number, at);
        }
    }

    /// Does the allowed set follow from the policy and the catalogue? Asked once.
    fn judge_policy(&mut self, number: u32, at: &mut At<'_>) {
        let Some(policy) = at.policies.get_mut(&number).filter(|policy| !policy.judged) else { return };
        policy.judged = true;
        let (residency, allowed) = (policy.residency.clone(), policy.allowed.clone());
        let Some(permitted) = self.permitted(&residency) else {
            let message = format!("'{residency}' is no residency policy");
            return self.note(Kind::Unreadable, at, message);
        };
        for region in &allowed {
            let index = region.parse().ok().and_then(|id| self.catalogue.index_of(&id));
            if !index.is_some_and(|index| permitted.contains(index)) {
                let message = format!("'{residency}' does not permit {region}, which it lists as allowed");
                self.note(Kind::AllowedTooWide, at, message);
            }
        }
    }

    /// An attempt, with its outcome or before it.
    pub(super) fn attempt(&mut self, entry: &Entry<'_>, at: &mut At<'_>) {
        let (common, number, over) = match entry {
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
            } => (
                (id, request, attempt, tenant, deployment, policy, region, at_ms, key.as_deref()),
                None,
                Some((*took_us, &**end)),
            ),
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
            } => (
                (id, request, attempt, tenant, deployment, policy, region, at_ms, Some(&**key)),
                Some(*number),
                None,
            ),
            other => unreachable!("called with an attempt, not {other:?}"),
        };
        let (id, request, attempt, tenant, deployment, policy, region, at_ms, key) = common;
        let Ok(key) = key.map(str::parse::<AttemptKey>).transpose() else {
            return self.note(Kind::Unreadable, at, "its key is none of an attempt".to_owned());
        };
        if !at.policies.contains_key(policy) {
            return self.note(
                Kind::Unreadable,
                at,
                format!("there is no policy {policy} before it in this file"),
            );
        }
        let (took_us, side) = match over.map(|(took_us, end)| (took_us, Ended::parse(end), end)) {
            None => (0, Side::Unanswered),
            Some((took_us, Some(end), _)) if end.was_answered() => (took_us, Side::Answered),
            Some((took_us, Some(_), _)) => (took_us, Side::Unanswered),
            Some((_, None, end)) => {
                return self.note(Kind::Unreadable, at, format!("'{end}' is no end of an attempt"));
            }
        };
        let selected = self.demands.filter.selects(Some(tenant), Some(deployment), *at_ms);
        if selected {
            self.judge_policy(*policy, at);
        }
        let Policy { residency, allowed, .. } = &at.policies[policy];
        if selected && !allowed.contains(&**region) {
            let message = format!(
                "request {request}, attempt {attempt}, was sent to {region}, which '{residency}' does not allow"
            );
            self.findings.add(Kind::ResidencyViolation, at.file, at.line, message);
        }
        let essence =
            Essence { chain: &at.chain, request, attempt: *attempt, region, residency, at_ms: *at_ms, key };
        if essence.id().to_string() != **id {
            let message = format!("receipt {id} does not say what it committed to");
            self.findings.add(Kind::WrongReceiptId, at.file, at.line, message);
        }
        self.demands.receipts.remove(&**id);
        self.saw(at, at_ms + took_us / 1000);
        // What could not be made durable may be there all the same, and is then written whole when it is over.
        let sent = key.filter(|_| over.is_some()).and_then(|key| self.chain(at).open.remove(&key.number));
        if let Some(place) = sent {
            return self.join.ended(place, took_us, side == Side::Answered);
        }
        self.attempts += u64::from(selected);
        let record = Record {
            request: (&**request).into(),
            attempt: *attempt,
            region: self.join.name(region),
            key,
            side,
            policy: self.join.name(residency),
            until_ms: at_ms + took_us / 1000,
            selected,
        };
        let place = self.join.add(record);
        if let Some(number) = number {
            self.chain(at).open.insert(number, place);
        }
    }

    /// An arrival, with its outcome or before it.
    pub(super) fn arrival(&mut self, entry: &Entry<'_>, at: &At<'_>) {
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
            return self.note(Kind::Unreadable, at, "its key is none of an attempt".to_owned());
        };
        let selected = self.demands.filter.selects(tenant.as_deref(), deployment.as_deref(), *at_ms);
        self.arrivals += u64::from(selected);
        self.saw(at, at_ms + took_us / 1000);
        let place = self.chain(at).summary.place.clone();
        let here = place.parse().ok().and_then(|id| self.catalogue.index_of(&id));
        let permits =
            self.permitted(residency).zip(here).is_some_and(|(permitted, here)| permitted.contains(here));
        let refused = match outcome {
            Some(NOT_RESIDENT_HERE) => true,
            Some(outcome) => !permits && REFUSED.contains(&outcome),
            None => false,
        };
        if selected && refused {
            self.refused += 1;
            if self.refusals.len() < REFUSALS_TOLD_MAX {
                let outcome = outcome.unwrap_or_default();
                self.refusals.push(format!(
                    "{}:{}: request {request}, attempt {attempt}, came to {place} under '{residency}' and was refused \
                     ({outcome})",
                    at.file, at.line
                ));
            }
        } else if selected && !permits {
            let message = format!(
                "request {request}, attempt {attempt}, was taken in {place}, which '{residency}' does not allow"
            );
            self.note(Kind::ResidencyViolation, at, message);
        }
        let record = Record {
            request: (&**request).into(),
            attempt: *attempt,
            region: self.join.name(&place),
            key,
            side: Side::Arrived,
            policy: self.join.name(residency),
            until_ms: at_ms + took_us / 1000,
            selected,
        };
        let place = self.join.add(record);
        if let Some(number) = number {
            self.chain(at).open.insert(number, place);
        }
    }

    /// The outcome of an earlier entry of the chain.
    pub(super) fn outcome(&mut self, number: u64, took_us: u64, end: &str, at: &At<'_>) {
        let Some(place) = self.chain(at).open.remove(&number) else {
            // Its beginning may be in a file that was archived.
            if !self.demands.partial {
                let message = format!("the outcome of number {number}, which is not before it in this chain");
                self.note(Kind::OutcomeWithoutAttempt, at, message);
            }
            return;
        };
        self.join.ended(place, took_us, Ended::parse(end).is_some_and(Ended::was_answered));
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

    fn chain(&mut self, at: &At<'_>) -> &mut super::Chain {
        self.chains.get_mut(&at.chain).expect("a file begins before its lines")
    }
}
