//! `meridian apply`: validates the desired deployments and tenants, compares them with the stored ones, and writes them
//! in one transaction.
//!
//! Any hub accepts the request, leader or not: the write is guarded by the revision that the difference was computed
//! against, so of two concurrent operators the second gets a conflict. The leader carries out the change
//! ([`scheduler_core::rollout`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use regions::{Catalogue, Deployment, DeploymentName, ResidencyPolicy, TenantId, TenantRules, Widening};
use replica_api::error::ErrorCode;
use scheduler_api::apply::{
    AppliedDeploymentsV1, AppliedV1, ApplyFileV1, ApplyV1, ChangeV1, Kind, PendingWideningV1, ProblemV1,
    ProblemsV1, ReaderV1, ResidencyChange, RolloutV1,
};
use scheduler_api::deployment::{DeploymentV1, DeploymentsV1, DesiredDeployments, Promotions};
use scheduler_api::error::HubErrorCode;
use scheduler_api::tenant::TenantsV1;
use scheduler_api::{VERSION, keys};
use scheduler_core::placement;
use scheduler_core::registry::RegisteredSpoke;
use scheduler_core::revisions::promotions_after;
use scheduler_core::rollout::{apply_files, diff, runnable, status};
use scheduler_store::{Compare, KeyValue, Op, Store, StoreError, Txn};
use supervision::task::blocking;

use super::api::{Body, HubApi, json_of};
use super::placements::DecisionEntries;
use super::records::{self, RecordError};
use super::replicas;
use crate::events::ConfigurationApplied;
use crate::respond::{self, ErrorResponse};

/// Maximum bytes of the files that an operator applies: ten thousand deployments as a person writes them.
pub(super) const BYTES_MAX: usize = 8 << 20;

type DeploymentMap = BTreeMap<DeploymentName, Deployment>;
type TenantMap = BTreeMap<TenantId, TenantRules>;

/// Record in the store, as far as it is readable.
struct StoredRecord<T> {
    revision: u64,
    all: T,
    note: Option<String>,
}

impl<T> StoredRecord<T> {
    /// Reads a record; an unreadable one is replaced by `published`.
    fn from_entry(
        entry: Option<KeyValue>,
        read: impl FnOnce(&KeyValue) -> Result<T, RecordError>,
        published: impl FnOnce() -> T,
        nothing: T,
    ) -> StoredRecord<T> {
        let Some(entry) = entry else { return StoredRecord { revision: 0, all: nothing, note: None } };
        let revision = entry.mod_revision;
        match read(&entry) {
            Ok(all) => StoredRecord { revision, all, note: None },
            Err(error) => {
                let note =
                    format!("{error}; this is the difference to what is published, and replaces the record");
                StoredRecord { revision, all: published(), note: Some(note) }
            }
        }
    }
}

/// The records of deployments and of tenants, which change in one transaction.
struct StoredConfiguration {
    deployments: StoredRecord<DesiredDeployments>,
    /// `None` if no tenants were ever applied.
    tenants: StoredRecord<Option<TenantMap>>,
}

impl StoredConfiguration {
    async fn read<S: Store>(api: &HubApi<S>) -> Result<StoredConfiguration, ErrorResponse> {
        let published = api.current.borrow().clone();
        let table = published.as_ref().map(|published| &published.table);
        let deployments = StoredRecord::from_entry(
            api.store.get(keys::DEPLOYMENTS).await?,
            records::wanted,
            || DesiredDeployments {
                applied: true,
                deployments: table.map(|table| table.deployments.clone()).unwrap_or_default(),
                promotions: Promotions::default(),
            },
            DesiredDeployments::default(),
        );
        let tenants = StoredRecord::from_entry(
            api.store.get(keys::TENANTS).await?,
            |entry| records::tenants(entry).map(Some),
            || table.and_then(|table| table.tenants.clone()).map(|tenants| tenants.all),
            None,
        );
        Ok(StoredConfiguration { deployments, tenants })
    }

    /// Returns the revision of the record that was written last.
    fn revision(&self) -> u64 {
        self.deployments.revision.max(self.tenants.revision)
    }

    /// Returns guards that fail if either record has changed.
    fn guards(&self) -> Vec<Compare> {
        let guard = |key: &str, revision| Compare::ModRevision(key.to_owned(), revision);
        vec![guard(keys::DEPLOYMENTS, self.deployments.revision), guard(keys::TENANTS, self.tenants.revision)]
    }
}

/// Applies files, or returns the changes that they would make (`dry_run`). Invalid files have a response of their own.
pub(super) async fn apply<S: Store>(
    State(api): State<HubApi<S>>,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let ApplyV1 { version: _, dry_run, base, hold, deployments, tenants } = json_of(body, BYTES_MAX)?;
    let (mut problems, files) = (Vec::new(), deployments);
    let spokes = registered_spokes(&api).await?;
    let registered = placement::registered_accelerators(&spokes);
    let stored = StoredConfiguration::read(&api).await?;
    let catalogue = api.catalogue.clone();
    // The checks of ten thousand placements take seconds.
    let (files, stored, deployments) = blocking(move || {
        let before = &stored.deployments.all.deployments;
        let deployments = files.as_ref().map(|files| {
            let deployments = apply_files::deployments(files, &catalogue, &registered, before)?;
            let deployments = by_name(deployments);
            let notes = placement::notes(before, &deployments, &catalogue, &registered);
            Ok((deployments, notes))
        });
        (files, stored, deployments)
    })
    .await;
    let deployments = deployments.transpose().map_err(|found: Vec<ProblemV1>| problems.extend(found));
    let tenants = tenants.map(|files| apply_files::tenants(&files, &api.catalogue));
    let tenants = tenants.transpose().map_err(|found| problems.extend(found));
    let (Ok(deployments), Ok(tenants)) = (deployments, tenants) else {
        return Ok(respond::with_body(HubErrorCode::InvalidFiles, ProblemsV1 { version: VERSION, problems }));
    };
    if deployments.is_none() && tenants.is_none() {
        let message = "Neither `deployments` nor `tenants` is set: there is nothing to apply.";
        return Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("deployments"));
    }
    if let Some(base) = base.filter(|base| *base != stored.revision()) {
        return Err(conflict(base, stored.revision()));
    }
    let (deployments, placement_notes) = deployments.unzip();
    if let (Some(files), Some(deployments)) = (&files, &deployments) {
        let before = &stored.deployments.all.deployments;
        let problems = not_runnable(&api.catalogue, &spokes, files, before, deployments);
        if !problems.is_empty() {
            let problems = ProblemsV1 { version: VERSION, problems };
            return Ok(respond::with_body(HubErrorCode::InvalidFiles, problems));
        }
    }
    let (mut changes, mut notes, mut puts) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(deployments) = &deployments {
        let before = &stored.deployments.all;
        let found = diff::deployments(&before.deployments, deployments, &api.catalogue);
        let promotions = promotions_after(before, deployments, hold);
        let changed = !found.is_empty() || promotions != before.promotions;
        notes.extend(model_changes(before, deployments, &promotions));
        notes.extend(placement_notes.into_iter().flatten());
        // An unreadable record is replaced even if nothing else changes.
        if changed || stored.deployments.note.is_some() {
            let wanted = DesiredDeployments { applied: true, deployments: deployments.clone(), promotions };
            puts.push((keys::DEPLOYMENTS, records::packed(&DeploymentsV1::from(&wanted))));
        }
        notes.extend(stored.deployments.note.clone());
        changes.extend(found);
    }
    if let Some(tenants) = &tenants {
        let (before, none) = (&stored.tenants, TenantMap::new());
        let found = diff::tenants(before.all.as_ref().unwrap_or(&none), tenants, &api.catalogue);
        // The first applied tenants replace the gateways' own tenant files, even if the list is empty.
        if !found.is_empty() || before.note.is_some() || before.all.is_none() {
            puts.push((keys::TENANTS, records::packed(&TenantsV1::from(tenants))));
        }
        notes.extend(before.note.clone());
        if before.all.is_none() {
            notes.push(
                "from now on every gateway uses these tenants and ignores those of its own file".to_owned(),
            );
        }
        let served = deployments.as_ref().unwrap_or(&stored.deployments.all.deployments);
        notes.extend(not_deployed(tenants, served));
        notes.extend(without_credentials(tenants));
        changes.extend(found);
    }
    notes.extend(changes.iter().filter_map(delay_note));
    let applied = !dry_run && !puts.is_empty();
    if applied {
        write(&api, puts, &stored).await?;
        let served = deployments.as_ref().unwrap_or(&stored.deployments.all.deployments).len();
        ConfigurationApplied { changes: changes.len(), deployments: served }.emit();
    }
    Ok(Json(AppliedV1 { version: VERSION, applied, base: stored.revision(), changes, notes }).into_response())
}

fn by_name(deployments: Vec<Deployment>) -> DeploymentMap {
    deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment)).collect()
}

/// Returns a problem for each new or changed deployment whose engine none of its registered regions has.
fn not_runnable(
    catalogue: &Catalogue,
    spokes: &[RegisteredSpoke],
    files: &[ApplyFileV1],
    before: &DeploymentMap,
    deployments: &DeploymentMap,
) -> Vec<ProblemV1> {
    let changed = deployments.values().filter(|deployment| before.get(&deployment.name) != Some(*deployment));
    let problem = |deployment: &Deployment| {
        let message = runnable::unavailable_engine(deployment, spokes, catalogue)?;
        let (file, line) = apply_files::place(files, &deployment.name);
        Some(ProblemV1 { file, line, message })
    };
    changed.filter_map(problem).collect()
}

/// Returns the registered spokes whose records can be read.
async fn registered_spokes<S: Store>(api: &HubApi<S>) -> Result<Vec<RegisteredSpoke>, ErrorResponse> {
    let entries = api.store.range(keys::SPOKES).await?.entries;
    Ok(entries.iter().filter_map(|entry| records::spoke(entry).ok()).collect())
}

/// Returns notes for the operator on changed models.
fn model_changes(
    before: &DesiredDeployments,
    deployments: &DeploymentMap,
    promotions: &Promotions,
) -> Vec<String> {
    let changes = deployments.iter().filter(|(name, deployment)| {
        let known = before.deployments.get(*name);
        known.is_some_and(|known| known.model_spec() != deployment.model_spec())
    });
    let note = |(name, _): (&DeploymentName, &Deployment)| {
        let then = if promotions.held.contains(name) {
            format!("traffic stays with the old model until `meridian apply --promote {name}`")
        } else {
            "traffic switches to the new model when its replicas are ready in every region".to_owned()
        };
        format!("the model of {name} changes: {then}; `meridian get rollout {name}` shows its replicas")
    };
    changes.map(note).collect()
}

/// Returns a note on deployments that tenants may use but that do not exist. They may be added later, or be misspelled.
fn not_deployed(tenants: &TenantMap, served: &DeploymentMap) -> Option<String> {
    let named = tenants.values().flat_map(|tenant| tenant.deployments.iter().flatten());
    let missing: BTreeSet<_> =
        named.filter(|name| !served.contains_key(*name)).map(|name| name.as_str()).collect();
    let list: Vec<_> = missing.into_iter().collect();
    (!list.is_empty()).then(|| format!("tenants may use {}, which is not deployed", list.join(", ")))
}

/// Returns notes on tenants as which only requests with a created key can authenticate.
fn without_credentials(tenants: &TenantMap) -> Vec<String> {
    let bare = tenants.values().filter(|rules| rules.keys.is_empty() && rules.issuer.is_none());
    let note = |rules: &TenantRules| {
        let id = &rules.id;
        format!(
            "tenant {id} has neither key_sha256 nor an issuer: `meridian key create --tenant {id}` creates a key"
        )
    };
    bare.map(note).collect()
}

/// Returns a note for the operator on a change that takes effect later.
fn delay_note(ChangeV1 { kind, name, fields, change: _ }: &ChangeV1) -> Option<String> {
    let widens = |change| matches!(change, ResidencyChange::Widens | ResidencyChange::NarrowsAndWidens);
    let subject = match kind {
        Kind::Tenant => format!("tenant {name}"),
        // The hub changes no other kind.
        Kind::Deployment | Kind::Other => name.clone(),
    };
    fields.iter().find_map(|field| field.residency_change).filter(|change| widens(*change)).map(|_| {
        format!(
            "the wider residency of {subject} takes effect when every gateway and spoke has the new route table; `meridian get rollout` lists those without it"
        )
    })
}

async fn write<S: Store>(
    api: &HubApi<S>,
    puts: Vec<(&'static str, Vec<u8>)>,
    stored: &StoredConfiguration,
) -> Result<(), ErrorResponse> {
    let before = stored.revision();
    let put = |(key, value): &(&'static str, Vec<u8>)| Op::Put {
        key: (*key).to_owned(),
        value: value.clone(),
        lease: None,
    };
    match api.store.txn(Txn { when: stored.guards(), then: puts.iter().map(put).collect() }).await {
        Ok(outcome) if outcome.succeeded => Ok(()),
        Ok(_) => {
            // Either another operator applied a change, or the first of two attempts of this transaction succeeded.
            let (mut all_ours, mut last) = (true, 0);
            for (key, value) in &puts {
                let now = api.store.get(key).await?;
                all_ours &=
                    now.as_ref().is_some_and(|now| *now.value == **value && now.mod_revision > before);
                last = last.max(now.map_or(0, |now| now.mod_revision));
            }
            if all_ours { Ok(()) } else { Err(conflict(before, last)) }
        }
        Err(StoreError::TooLarge(bytes)) => {
            let message = format!(
                "The packed configuration has {bytes} bytes, more than one store transaction takes; deploy less."
            );
            Err(ErrorResponse::new(ErrorCode::BodyTooLarge, message))
        }
        Err(error) => {
            let message = format!(
                "{error}. It is unknown whether the configuration was applied; check with `meridian get deployments`."
            );
            Err(ErrorResponse::new(HubErrorCode::StoreUnavailable, message))
        }
    }
}

fn conflict(base: u64, stored: u64) -> ErrorResponse {
    let message = format!(
        "The configuration has changed (revision {stored}) since revision {base}, which this change is based on. \
         Nothing was applied; review the difference again."
    );
    ErrorResponse::new(HubErrorCode::Conflict, message).with_field("base")
}

/// Returns the applied deployments with their status.
pub(super) async fn deployments<S: Store>(State(api): State<HubApi<S>>) -> Result<Response, ErrorResponse> {
    let applied = api.store.get(keys::DEPLOYMENTS).await?;
    let decisions = DecisionEntries::read(&api.store).await?;
    let spokes = api.store.range(keys::SPOKES).await?.entries;
    // Not borrowed meanwhile: the next table would wait for its readers.
    let published = api.current.borrow().clone();
    let catalogue = api.catalogue.clone();
    // `meridian apply --wait` requests this twice a second, and the records and the response of ten thousand deployments have
    // megabytes.
    let response = blocking(move || {
        let (revision, deployments) = match applied {
            Some(entry) => (entry.mod_revision, records::wanted(&entry).map_err(unreadable)?.deployments),
            None => (0, BTreeMap::new()),
        };
        let spokes: Vec<_> = spokes.iter().filter_map(|entry| records::spoke(entry).ok()).collect();
        let table = published.as_ref().map(|published| &published.table);
        let decided = decisions.decided_on(revision);
        let statuses = status::statuses(&deployments, table, decided.as_ref(), &spokes, &catalogue);
        let deployments = deployments.values().map(DeploymentV1::from).collect();
        Ok(Json(AppliedDeploymentsV1 { version: VERSION, revision, deployments, statuses }).into_response())
    });
    response.await
}

/// Returns the applied tenants.
pub(super) async fn tenants<S: Store>(
    State(api): State<HubApi<S>>,
) -> Result<Json<TenantsV1>, ErrorResponse> {
    let Some(entry) = api.store.get(keys::TENANTS).await? else {
        let message = "No tenants are applied; every gateway uses its own tenants file.";
        return Err(ErrorResponse::new(ErrorCode::NotFound, message));
    };
    Ok(Json(TenantsV1::from(&records::tenants(&entry).map_err(unreadable)?)))
}

/// Returns the pending part of the rollout.
pub(super) async fn rollout<S: Store>(
    State(api): State<HubApi<S>>,
) -> Result<Json<RolloutV1>, ErrorResponse> {
    let published = api.published()?;
    let table = &published.table;
    let found = api.store.range(keys::READERS).await?.entries;
    let readers: Vec<_> = found.iter().filter_map(|entry| records::reader(entry).ok()).collect();
    let spokes = registered_spokes(&api).await?;
    let pending =
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
        pending(Kind::Deployment, name, now, widening)
    });
    let tenants = table.tenants.iter().flat_map(|tenants| {
        tenants.widening.iter().map(move |(id, widening)| {
            let now = tenants.all.get(id).map(|known| &known.residency);
            pending(Kind::Tenant, id, now, widening)
        })
    });
    let pending = deployments.chain(tenants).collect();
    let reported = readers.iter().map(|(reader, generation)| ReaderV1 {
        version: VERSION,
        reader: reader.to_string(),
        generation: generation.to_string(),
    });
    Ok(Json(RolloutV1 {
        version: VERSION,
        generation: table.generation.to_string(),
        pending,
        readers: reported.collect(),
        deployments: replicas::list(table, spokes),
    }))
}

fn unreadable(error: records::RecordError) -> ErrorResponse {
    ErrorResponse::new(
        HubErrorCode::StoreUnavailable,
        format!("{error}; the last valid configuration stays in force. Apply again to replace the record."),
    )
}
