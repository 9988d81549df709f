//! The entries of a request: before it is forwarded, and when it is over.

use super::Writer;
use crate::events::{Finished, Understood, began_ms};
use crate::receipts::Received;
use crate::receipts::batch::{Batch, arrival, micros};
use crate::receipts::before::Sending;
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::entry::Entry;
use gateway_core::receipt::{AttemptKey, ReceiptContent};
use gateway_core::residency::Residency;
use gateway_core::trail::{AttemptRecord, PolicyVersion};
use regions::set::RegionSet;

/// Policies that a file remembers having written. A client may narrow its policy in many ways; beyond this they are forgotten
/// and written again.
pub(super) const POLICIES_MAX: usize = 1024;

impl Writer {
    /// A request of a gateway is over.
    pub(super) fn put_finished(&mut self, request: &Finished, batch: &mut Batch) {
        let Finished { id, arrived, at_ms, tls_ended_here, tenant, trail, understood, receipt, .. } = request;
        if trail.count() == 0 {
            return;
        }
        let tenant = tenant.as_ref().expect("nothing is sent of a request of nobody");
        let Understood { deployment, cost: _, policy: admitted } =
            understood.as_ref().expect("nothing is sent before it is understood");
        for attempt in trail.attempts() {
            let AttemptRecord { number, region, cause, began: _, took, end, key, policy } = attempt;
            let end = AttemptResult::from(*end);
            if self.open.remove(key) {
                batch.put(&Entry::Outcome { number: *key, took_us: micros(*took), end: end.as_str().into() });
                continue;
            }
            if end == AttemptResult::ReceiptUnavailable {
                // Nothing was sent.
                continue;
            }
            let PolicyVersion { generation, residency, allowed } = policy.as_deref().unwrap_or(admitted);
            let policy = self.policy(residency, allowed, batch);
            let tenant = self.pseudonyms.of(tenant.as_str());
            let at_ms = began_ms(attempt, *arrived, *at_ms);
            let told = receipt.filter(|(told, _)| told == key).map(|(_, id)| id);
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
                id: told.unwrap_or_else(|| essence.id()).text().into(),
                request: id.into(),
                attempt: *number,
                tenant: tenant.into(),
                deployment: deployment.as_str().into(),
                generation: generation.to_string().into(),
                policy,
                tls: tls_ended_here.then(|| self.place.as_str().into()),
                region: region.into(),
                at_ms,
                took_us: micros(*took),
                cause: cause.as_str().into(),
                end: end.as_str().into(),
                key: Some(key.to_string().into()),
            });
        }
    }

    /// A gateway is about to send a request.
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
            tls: tls_ended_here.then(|| self.place.as_str().into()),
            region: region.into(),
            at_ms: *at_ms,
            cause: cause.as_str().into(),
            key: key.to_string().into(),
        });
    }

    /// A request of a region is over.
    pub(super) fn put_received(&mut self, over: &Received, batch: &mut Batch) {
        match over.number.filter(|number| self.open.remove(number)) {
            Some(number) => {
                batch.put(&Entry::Outcome { number, took_us: micros(over.took), end: over.outcome.into() })
            }
            None => batch.put(&arrival(&mut self.pseudonyms, over)),
        }
    }

    /// The number of a policy in the current file, in which it is written out when it is new there.
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
