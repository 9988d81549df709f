//! What an operator wants to be so: read whole, compared with what there is, and written in one transaction or not at all.
//!
//! Any hub takes it, whether it leads or not: what is written is guarded by the revision that it is the difference to, so of
//! two operators one is told that the other was there first. How it comes about is decided by whoever leads
//! ([`scheduler_core::rollout`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use regions::{Deployment, DeploymentName, ResidencyPolicy, TenantId, TenantRules, Widening};
use scheduler_core::revisions::Orders;
use scheduler_core::rollout::{DesiredDeployments, apply_files, diff};
use scheduler_core::wire::apply::{
    AppliedDeploymentsV1, AppliedV1, ApplyV1, ChangeV1, Kind, PendingWideningV1, ProblemsV1, ReaderV1,
    ResidencyChange, RolloutV1,
};
use scheduler_core::wire::deployment::{DeploymentV1, DeploymentsV1};
use scheduler_core::wire::tenant::TenantsV1;
use scheduler_core::wire::{VERSION, keys};
use scheduler_store::{Compare, KeyValue, Op, Store, StoreError, Txn};

use super::http::Desk;
use super::records::{self, RecordError};
use super::replicas;
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

type Deployments = BTreeMap<DeploymentName, Deployment>;
type Tenants = BTreeMap<TenantId, TenantRules>;

/// What stands in the store, and what can be read of it.
struct Before<T> {
    revision: u64,
    all: T,
    note: Option<String>,
}

impl<T> Before<T> {
    /// A record as it is, or `published` where it cannot be read.
    fn of(
        entry: Option<KeyValue>,
        read: impl FnOnce(&KeyValue) -> Result<T, RecordError>,
        published: impl FnOnce() -> T,
        nothing: T,
    ) -> Before<T> {
        let Some(entry) = entry else { return Before { revision: 0, all: nothing, note: None } };
        let revision = entry.mod_revision;
        match read(&entry) {
            Ok(all) => Before { revision, all, note: None },
            Err(error) => {
                let note = format!("{error}; this is the difference to what is published, and mends it");
                Before { revision, all: published(), note: Some(note) }
            }
        }
    }
}

/// Both records, which change together or not at all.
struct Stands {
    deployments: Before<DesiredDeployments>,
    /// Nothing where none were ever applied.
    tenants: Before<Option<Tenants>>,
}

impl Stands {
    async fn read<S: Store>(desk: &Desk<S>) -> Result<Stands, Refusal> {
        let published = desk.current.borrow().clone();
        let table = published.as_ref().map(|published| &published.table);
        let deployments = Before::of(
            desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)?,
            records::wanted,
            || DesiredDeployments {
                applied: true,
                deployments: table.map(|table| table.deployments.clone()).unwrap_or_default(),
                orders: Orders::default(),
            },
            DesiredDeployments::default(),
        );
        let tenants = Before::of(
            desk.store.get(keys::TENANTS).await.map_err(refusal)?,
            |entry| records::tenants(entry).map(Some),
            || table.and_then(|table| table.tenants.clone()).map(|tenants| tenants.all),
            None,
        );
        Ok(Stands { deployments, tenants })
    }

    /// The revision of whichever was written last: another, as soon as either is.
    fn revision(&self) -> u64 {
        self.deployments.revision.max(self.tenants.revision)
    }

    /// Both are as they were seen.
    fn guards(&self) -> Vec<Compare> {
        let guard = |key: &str, revision| Compare::ModRevision(key.to_owned(), revision);
        vec![guard(keys::DEPLOYMENTS, self.deployments.revision), guard(keys::TENANTS, self.tenants.revision)]
    }
}

/// Applies files, or tells what that would change.
pub(super) async fn apply<S: Store>(desk: &Desk<S>, message: ApplyV1) -> Result<AppliedV1, NotApplied> {
    let ApplyV1 { version: _, dry_run, base, hold, deployments, tenants } = message;
    let mut problems = Vec::new();
    let deployments = deployments.map(|files| apply_files::deployments(&files, &desk.catalogue));
    let deployments = deployments.transpose().map_err(|found| problems.extend(found));
    let tenants = tenants.map(|files| apply_files::tenants(&files, &desk.catalogue));
    let tenants = tenants.transpose().map_err(|found| problems.extend(found));
    let (Ok(deployments), Ok(tenants)) = (deployments, tenants) else {
        return Err(NotApplied::Problems(ProblemsV1 { version: VERSION, problems }));
    };
    if deployments.is_none() && tenants.is_none() {
        let message = "Neither `deployments` nor `tenants` is there: nothing is to be applied.";
        return Err(Refusal::new(Code::InvalidValue, message).of("deployments").into());
    }
    let stands = Stands::read(desk).await?;
    if let Some(base) = base.filter(|base| *base != stands.revision()) {
        return Err(overtaken(base, stands.revision()).into());
    }
    let deployments = deployments.map(named);
    let (mut changes, mut notes, mut puts) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(deployments) = &deployments {
        let before = &stands.deployments.all;
        let found = diff::deployments(&before.deployments, deployments, &desk.catalogue);
        let orders = before.orders_after(deployments, hold);
        let changed = !found.is_empty() || orders != before.orders;
        notes.extend(model_changes(before, deployments, &orders));
        // What cannot be read is written anew even where it changes nothing.
        if changed || stands.deployments.note.is_some() {
            let wanted = DesiredDeployments { applied: true, deployments: deployments.clone(), orders };
            puts.push((keys::DEPLOYMENTS, records::packed(&DeploymentsV1::from(&wanted))));
        }
        notes.extend(stands.deployments.note.clone());
        changes.extend(found);
    }
    if let Some(tenants) = &tenants {
        let (before, nobody) = (&stands.tenants, Tenants::new());
        let found = diff::tenants(before.all.as_ref().unwrap_or(&nobody), tenants, &desk.catalogue);
        // The first that are applied take the place of every gateway's own, also if they are none.
        if !found.is_empty() || before.note.is_some() || before.all.is_none() {
            puts.push((keys::TENANTS, records::packed(&TenantsV1::from(tenants))));
        }
        notes.extend(before.note.clone());
        if before.all.is_none() {
            notes.push(
                "from now on these are the tenants of every gateway, and those of its own file are not"
                    .to_owned(),
            );
        }
        let served = deployments.as_ref().unwrap_or(&stands.deployments.all.deployments);
        notes.extend(not_deployed(tenants, served));
        changes.extend(found);
    }
    notes.extend(changes.iter().filter_map(waits));
    let applied = !dry_run && !puts.is_empty();
    if applied {
        write(desk, puts, &stands).await?;
        let served = deployments.as_ref().unwrap_or(&stands.deployments.all.deployments).len();
        Applied { changes: changes.len(), deployments: served }.emit();
    }
    Ok(AppliedV1 { version: VERSION, applied, base: stands.revision(), changes, notes })
}

fn named(deployments: Vec<Deployment>) -> Deployments {
    deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment)).collect()
}

/// What an operator has to know of models that change.
fn model_changes(before: &DesiredDeployments, deployments: &Deployments, orders: &Orders) -> Vec<String> {
    let changes = deployments.iter().filter(|(name, deployment)| {
        let known = before.deployments.get(*name);
        known.is_some_and(|known| known.model_spec() != deployment.model_spec())
    });
    let note = |(name, _): (&DeploymentName, &Deployment)| {
        let then = if orders.held.contains(name) {
            format!("traffic stays with the old model until `meridian apply --promote {name}`")
        } else {
            "traffic switches to the new model when its replicas are ready in every region".to_owned()
        };
        format!("the model of {name} changes: {then}; `meridian get rollout {name}` shows its replicas")
    };
    changes.map(note).collect()
}

/// A tenant may be let in to what is to come; a name that was mistyped looks the same.
fn not_deployed(tenants: &Tenants, served: &Deployments) -> Option<String> {
    let named = tenants.values().flat_map(|tenant| tenant.deployments.iter().flatten());
    let missing: BTreeSet<_> =
        named.filter(|name| !served.contains_key(*name)).map(|name| name.as_str()).collect();
    let list: Vec<_> = missing.into_iter().collect();
    (!list.is_empty()).then(|| format!("tenants may use {}, which is not deployed", list.join(", ")))
}

/// What an operator has to know of a change that does not come about at once.
fn waits(ChangeV1 { kind, name, fields, change: _ }: &ChangeV1) -> Option<String> {
    let widens = |change| matches!(change, ResidencyChange::Widens | ResidencyChange::NarrowsAndWidens);
    let whose = match kind {
        Kind::Deployment => name.clone(),
        Kind::Tenant => format!("tenant {name}"),
    };
    fields.iter().find_map(|field| field.residency_change).filter(|change| widens(*change)).map(|_| {
        format!(
            "the wider residency of {whose} comes when every gateway and spoke has heard of it: `meridian get rollout` says who is missing"
        )
    })
}

async fn write<S: Store>(
    desk: &Desk<S>,
    puts: Vec<(&'static str, Vec<u8>)>,
    stands: &Stands,
) -> Result<(), Refusal> {
    let before = stands.revision();
    let put = |(key, value): &(&'static str, Vec<u8>)| Op::Put {
        key: (*key).to_owned(),
        value: value.clone(),
        lease: None,
    };
    match desk.store.txn(Txn { when: stands.guards(), then: puts.iter().map(put).collect() }).await {
        Ok(outcome) if outcome.succeeded => Ok(()),
        Ok(_) => {
            // Either somebody else was there first, or this was, at the first of two tries.
            let (mut all_ours, mut last) = (true, 0);
            for (key, value) in &puts {
                let now = desk.store.get(key).await.map_err(refusal)?;
                all_ours &=
                    now.as_ref().is_some_and(|now| *now.value == **value && now.mod_revision > before);
                last = last.max(now.map_or(0, |now| now.mod_revision));
            }
            if all_ours { Ok(()) } else { Err(overtaken(before, last)) }
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
pub(super) async fn wanted<S: Store>(desk: &Desk<S>) -> Result<AppliedDeploymentsV1, Refusal> {
    let entry = desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)?;
    let Some(entry) = entry else {
        return Ok(AppliedDeploymentsV1 { version: VERSION, revision: 0, deployments: Vec::new() });
    };
    let wanted = records::wanted(&entry).map_err(unreadable)?;
    let deployments = wanted.deployments.values().map(DeploymentV1::from).collect();
    Ok(AppliedDeploymentsV1 { version: VERSION, revision: entry.mod_revision, deployments })
}

/// The tenants that were applied; nobody's, if none were.
pub(super) async fn tenants<S: Store>(desk: &Desk<S>) -> Result<TenantsV1, Refusal> {
    let entry = desk.store.get(keys::TENANTS).await.map_err(refusal)?;
    let Some(entry) = entry else {
        let message = "No tenants were applied: every gateway goes by its own file.";
        return Err(Refusal::new(Code::NotFound, message));
    };
    Ok(TenantsV1::from(&records::tenants(&entry).map_err(unreadable)?))
}

/// What of it has not come about yet.
pub(super) async fn rollout<S: Store>(desk: &Desk<S>) -> Result<RolloutV1, Refusal> {
    let published = desk.current.borrow().clone();
    let not_yet = || Refusal::new(Code::NotReady, "No route table has been published yet.");
    let table = &published.as_ref().ok_or_else(not_yet)?.table;
    let found = desk.store.range(keys::READERS).await.map_err(refusal)?.entries;
    let readers: Vec<_> = found.iter().filter_map(|entry| records::reader(entry).ok()).collect();
    let spokes = desk.store.range(keys::SPOKES).await.map_err(refusal)?.entries;
    let spokes = spokes.iter().filter_map(|entry| records::standing(entry).ok()).collect();
    let waiting =
        |kind, name: &dyn Display, now: Option<&ResidencyPolicy>, widening: &Widening| PendingWideningV1 {
            kind,
            name: name.to_string(),
            residency: now.map(ToString::to_string).unwrap_or_default(),
            to: widening.to.to_string(),
            since: widening.since.to_string(),
            outdated_readers: readers
                .iter()
                .filter(|(_, running)| *running < widening.since)
                .map(|(reader, _)| reader.to_string())
                .collect(),
        };
    let deployments = table.widening.iter().map(|(name, widening)| {
        let now = table.deployments.get(name).map(|known| &known.residency);
        waiting(Kind::Deployment, name, now, widening)
    });
    let tenants = table.tenants.iter().flat_map(|tenants| {
        tenants.widening.iter().map(move |(id, widening)| {
            let now = tenants.all.get(id).map(|known| &known.residency);
            waiting(Kind::Tenant, id, now, widening)
        })
    });
    let waiting = deployments.chain(tenants).collect();
    let said = readers.iter().map(|(reader, generation)| ReaderV1 {
        version: VERSION,
        reader: reader.to_string(),
        generation: generation.to_string(),
    });
    Ok(RolloutV1 {
        version: VERSION,
        generation: table.generation.to_string(),
        pending: waiting,
        readers: said.collect(),
        deployments: replicas::of(table, spokes),
    })
}

fn unreadable(error: records::RecordError) -> Refusal {
    Refusal::new(
        Code::StoreUnavailable,
        format!("{error}; the last good one stays in force. Apply anew to mend it."),
    )
}
