//! What an operator wants to be so: read whole, compared with what there is, and written in one transaction or not at all.
//!
//! Any hub takes it, whether it leads or not: what is written is guarded by the revision that it is the difference to, so of
//! two operators one is told that the other was there first. How it comes about is decided by whoever leads
//! ([`scheduler_core::rollout`]).

use std::collections::BTreeMap;

use regions::{Deployment, DeploymentName};
use scheduler_core::rollout::{Wanted, candidate, diff};
use scheduler_core::wire::apply::{
    AppliedV1, ApplyV1, ChangeV1, LawChange, ProblemsV1, ReaderV1, RolloutV1, WaitingV1, WantedV1,
};
use scheduler_core::wire::route::{DeploymentV1, DeploymentsV1};
use scheduler_core::wire::{VERSION, keys};
use scheduler_store::{Compare, KeyValue, Op, Store, StoreError, Txn};

use super::http::Desk;
use super::records;
use super::spokes::refusal;
use crate::events::Applied;
use crate::respond::{Code, Refusal};

/// Why files are not applied.
pub(super) enum NotApplied {
    /// They are wrong.
    Problems(ProblemsV1),
    Refused(Refusal),
}

impl From<Refusal> for NotApplied {
    fn from(refusal: Refusal) -> NotApplied {
        NotApplied::Refused(refusal)
    }
}

/// What stands in the store, and what can be read of it.
struct Before {
    revision: u64,
    deployments: BTreeMap<DeploymentName, Deployment>,
    note: Option<String>,
}

/// Applies files, or tells what that would change.
pub(super) async fn apply<S: Store>(desk: &Desk<S>, message: ApplyV1) -> Result<AppliedV1, NotApplied> {
    let ApplyV1 { version: _, dry_run, base, deployments } = message;
    let wanted = candidate::deployments(&deployments, &desk.catalogue)
        .map_err(|problems| NotApplied::Problems(ProblemsV1 { version: VERSION, problems }))?;
    let wanted = Wanted { applied: true, deployments: named(wanted) };
    let before = before(desk).await?;
    if let Some(base) = base.filter(|base| *base != before.revision) {
        return Err(overtaken(base, before.revision).into());
    }
    let changes = diff::deployments(&before.deployments, &wanted.deployments, &desk.catalogue);
    let mut notes: Vec<_> = before.note.clone().into_iter().collect();
    notes.extend(changes.iter().filter_map(waits));
    // What cannot be read is written anew even where it changes nothing.
    let nothing_to_do = changes.is_empty() && before.note.is_none();
    let applied = !dry_run && !nothing_to_do;
    if applied {
        write(desk, &wanted, before.revision).await?;
        Applied { changes: changes.len(), deployments: wanted.deployments.len() }.emit();
    }
    Ok(AppliedV1 { version: VERSION, applied, base: before.revision, changes, notes })
}

fn named(deployments: Vec<Deployment>) -> BTreeMap<DeploymentName, Deployment> {
    deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment)).collect()
}

async fn before<S: Store>(desk: &Desk<S>) -> Result<Before, Refusal> {
    let Some(entry) = desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)? else {
        return Ok(Before { revision: 0, deployments: BTreeMap::new(), note: None });
    };
    let revision = entry.mod_revision;
    match records::wanted(&entry) {
        Ok(wanted) => Ok(Before { revision, deployments: wanted.deployments, note: None }),
        Err(error) => {
            let published = desk.current.borrow().clone();
            let deployments = published.map(|published| published.table.deployments.clone());
            let note = format!("{error}; this is the difference to what is published, and mends it");
            Ok(Before { revision, deployments: deployments.unwrap_or_default(), note: Some(note) })
        }
    }
}

/// What an operator has to know of a change that does not come about at once.
fn waits(ChangeV1 { name, fields, change: _ }: &ChangeV1) -> Option<String> {
    let widens = |law| matches!(law, LawChange::Widens | LawChange::NarrowsAndWidens);
    fields.iter().find_map(|field| field.law).filter(|law| widens(*law)).map(|_| {
        format!(
            "the wider residency of {name} comes when every gateway and spoke has heard of it: `meridian get rollout` says who is missing"
        )
    })
}

async fn write<S: Store>(desk: &Desk<S>, wanted: &Wanted, before: u64) -> Result<(), Refusal> {
    let value = records::packed(&DeploymentsV1::from(wanted));
    let when = vec![Compare::ModRevision(keys::DEPLOYMENTS.to_owned(), before)];
    let then = vec![Op::Put { key: keys::DEPLOYMENTS.to_owned(), value: value.clone(), lease: None }];
    match desk.store.txn(Txn { when, then }).await {
        Ok(outcome) if outcome.succeeded => Ok(()),
        Ok(_) => {
            // Either somebody else was there first, or this was, at the first of two tries.
            let now = desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)?;
            let ours = |now: &KeyValue| *now.value == *value && now.mod_revision > before;
            if now.as_ref().is_some_and(ours) {
                return Ok(());
            }
            Err(overtaken(before, now.map_or(0, |now| now.mod_revision)))
        }
        Err(StoreError::TooLarge(bytes)) => {
            let message = format!(
                "These are {bytes} bytes, packed, and more than the store takes at once: deploy less."
            );
            Err(Refusal::new(Code::BodyTooLarge, message))
        }
        Err(error) => {
            let message =
                format!("{error}. Whether it was applied is not known: `meridian get deployments` says so.");
            Err(Refusal::new(Code::StoreUnavailable, message))
        }
    }
}

fn overtaken(seen: u64, stands: u64) -> Refusal {
    let message = format!(
        "Somebody else has applied something meanwhile (revision {stands}; this is a change to {seen}). Nothing was changed: \
         look at the difference again."
    );
    Refusal::new(Code::Conflict, message).of("base")
}

/// What was applied.
pub(super) async fn wanted<S: Store>(desk: &Desk<S>) -> Result<WantedV1, Refusal> {
    let entry = desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)?;
    let Some(entry) = entry else {
        return Ok(WantedV1 { version: VERSION, revision: 0, deployments: Vec::new() });
    };
    let wanted = records::wanted(&entry).map_err(unreadable)?;
    let deployments = wanted.deployments.values().map(DeploymentV1::from).collect();
    Ok(WantedV1 { version: VERSION, revision: entry.mod_revision, deployments })
}

/// What of it has not come about yet.
pub(super) async fn rollout<S: Store>(desk: &Desk<S>) -> Result<RolloutV1, Refusal> {
    let published = desk.current.borrow().clone();
    let not_yet = || Refusal::new(Code::NotReady, "No route table has been published yet.");
    let table = &published.as_ref().ok_or_else(not_yet)?.table;
    let found = desk.store.range(keys::READERS).await.map_err(refusal)?.entries;
    let readers: Vec<_> = found.iter().filter_map(|entry| records::reader(entry).ok()).collect();
    let waiting = table.widening.iter().map(|(name, widening)| WaitingV1 {
        name: name.to_string(),
        residency: table.deployments.get(name).map(|known| known.residency.to_string()).unwrap_or_default(),
        to: widening.to.to_string(),
        since: widening.since.to_string(),
        missing: readers
            .iter()
            .filter(|(_, running)| *running < widening.since)
            .map(|(reader, _)| reader.to_string())
            .collect(),
    });
    let waiting = waiting.collect();
    let said = readers.iter().map(|(reader, generation)| ReaderV1 {
        version: VERSION,
        reader: reader.to_string(),
        generation: generation.to_string(),
    });
    Ok(RolloutV1 {
        version: VERSION,
        generation: table.generation.to_string(),
        waiting,
        readers: said.collect(),
    })
}

fn unreadable(error: records::RecordError) -> Refusal {
    Refusal::new(
        Code::StoreUnavailable,
        format!("{error}; the last good one stays in force. Apply anew to mend it."),
    )
}
