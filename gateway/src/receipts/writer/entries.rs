//! Entries of a request: before it is forwarded, and when it has ended.

use super::Writer;
use crate::events::{FinishedRequest, ResolvedRequest, began_ms};
use crate::receipts::Received;
use crate::receipts::batch::{Batch, arrival, micros};
use crate::receipts::write_ahead::Sending;
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::entry::Entry;
use gateway_core::receipt::{AttemptKey, ReceiptContent};
use gateway_core::residency::Residency;
use gateway_core::trail::{AttemptRecord, PolicyVersion};
use regions::set::RegionSet;

/// Maximum number of policies that a file remembers. A client may narrow its policy in many ways; beyond this number
/// they are cleared and written again.
pub(super) const POLICIES_MAX: usize = 1024;

impl Writer {
    /// Adds the entries of a finished request of a gateway.
    pub(super) fn put_finished(&mut self, request: &FinishedRequest, batch: &mut Batch) {
        let FinishedRequest { id, arrived, at_ms, tls_ended_here, tenant, trail, resolved, receipt, .. } =
            request;
        if trail.count() == 0 {
            return;
        }
        let tenant = tenant.as_ref().expect("only an authenticated request is sent");
        let ResolvedRequest { deployment, cost: _, policy: admitted } =
            resolved.as_ref().expect("only a parsed request is sent");
        for attempt in trail.attempts() {
            let AttemptRecord {
                number,
                region,
                instance: _,
                cause,
                began: _,
                took,
                end,
                key,
                policy,
                trace: _,
            } = attempt;
            let end = AttemptResult::from(*end);
            if self.open.remove(key) {
                batch.put(&Entry::Outcome { number: *key, took_us: micros(*took), end: end.as_str().into() });
                continue;
            }
            if end == AttemptResult::ReceiptUnavailable {
                // The attempt was not made.
                continue;
            }
            let PolicyVersion { generation, residency, allowed } = policy.as_deref().unwrap_or(admitted);
            let policy = self.policy(residency, allowed, batch);
            let tenant = self.pseudonyms.of(tenant.as_str());
            let at_ms = began_ms(attempt, *arrived, *at_ms);
            let reported = receipt.filter(|(reported, _)| reported == key).map(|(_, id)| id);
            let region = self.regions[region.as_usize()].as_str();
            let key = AttemptKey { gateway: self.process, number: *key };
            let essence = ReceiptContent {
                chain: &self.chain,
                request: id,
                attempt: *number,
                region,
                residency: residency.as_str(),
                at_ms,
                key: Some(key),
            };
            batch.put(&Entry::Attempt {
                id: reported.unwrap_or_else(|| essence.id()).text().into(),
                request: id.into(),
                attempt: *number,
                tenant: tenant.into(),
                deployment: deployment.as_str().into(),
                generation: generation.to_string().into(),
                policy,
                tls: tls_ended_here.then(|| self.location.as_str().into()),
                region: region.into(),
                at_ms,
                took_us: micros(*took),
                cause: cause.as_str().into(),
                end: end.as_str().into(),
                key: Some(key.to_string().into()),
            });
        }
    }

    /// Adds the write-ahead receipt of an attempt of a gateway.
    pub(super) fn put_sending(&mut self, sending: &Sending, batch: &mut Batch) {
        let Sending { number, request, attempt, tenant, deployment, policy, .. } = sending;
        let Sending { tls_ended_here, region, at_ms, cause, .. } = sending;
        let PolicyVersion { generation, residency, allowed } = &**policy;
        let policy = self.policy(residency, allowed, batch);
        let tenant = self.pseudonyms.of(tenant.as_str());
        let region = self.regions[region.as_usize()].as_str();
        let key = AttemptKey { gateway: self.process, number: *number };
        let essence = ReceiptContent {
            chain: &self.chain,
            request,
            attempt: *attempt,
            region,
            residency: residency.as_str(),
            at_ms: *at_ms,
            key: Some(key),
        };
        batch.put(&Entry::Sent {
            id: essence.id().text().into(),
            number: *number,
            request: request.into(),
            attempt: *attempt,
            tenant: tenant.into(),
            deployment: deployment.as_str().into(),
            generation: generation.to_string().into(),
            policy,
            tls: tls_ended_here.then(|| self.location.as_str().into()),
            region: region.into(),
            at_ms: *at_ms,
            cause: cause.as_str().into(),
            key: key.to_string().into(),
        });
    }

    /// Adds the entry of a finished request of an ingress.
    pub(super) fn put_received(&mut self, request: &Received, batch: &mut Batch) {
        match request.number.filter(|number| self.open.remove(number)) {
            Some(number) => batch.put(&Entry::Outcome {
                number,
                took_us: micros(request.took),
                end: request.outcome.into(),
            }),
            None => batch.put(&arrival(&mut self.pseudonyms, request)),
        }
    }

    /// Returns the number of a policy in the current file, and adds its entry if it is new there.
    fn policy(&mut self, residency: &Residency, allowed: &RegionSet, batch: &mut Batch) -> u32 {
        let same = |policies: &Vec<(Residency, u32)>| {
            policies.iter().find(|(known, _)| known == residency).map(|(_, number)| *number)
        };
        if let Some(number) = self.policies.get(allowed).and_then(same) {
            return number;
        }
        if self.policies_known == POLICIES_MAX {
            self.forget_policies();
        }
        let policy = self.next_policy;
        self.next_policy += 1;
        self.policies_known += 1;
        self.policies.entry(*allowed).or_default().push((residency.clone(), policy));
        let allowed = allowed.iter().map(|region| self.regions[region.as_usize()].as_str().into());
        batch.put(&Entry::Policy {
            policy,
            residency: residency.as_str().into(),
            allowed: allowed.collect(),
        });
        policy
    }
}
