//! Promotion of the next model of a deployment, where the deployment waits for an operator.
//!
//! The record names the promoted revision, not only the deployment: replicas of a third revision that appear later are
//! not served because of it. The leader switches ([`scheduler_core::revisions`]) as soon as the replicas are ready.

use axum::Json;
use axum::extract::{Path, State};
use regions::DeploymentName;
use replica_api::error::ErrorCode;
use scheduler_api::deployment::{DeploymentsV1, PromotedV1};
use scheduler_api::error::HubErrorCode;
use scheduler_api::{keys, parsed};
use scheduler_store::{Compare, Op, Store, Txn};

use super::api::HubApi;
use super::records;
use crate::events::Promoted;
use crate::respond::ErrorResponse;

/// Promotes the next model of a deployment.
pub(super) async fn promote<S: Store>(
    State(api): State<HubApi<S>>,
    Path(name): Path<String>,
) -> Result<Json<PromotedV1>, ErrorResponse> {
    let name: DeploymentName = parsed("name", &name)?;
    let published = api.published()?;
    let table = &published.table;
    if !table.deployments.contains_key(&name) {
        let message = format!("There is no deployment `{name}`; `meridian get deployments` lists them.");
        return Err(ErrorResponse::new(ErrorCode::NotFound, message).with_field("name"));
    }
    let conflict =
        |message: String| Err(ErrorResponse::new(HubErrorCode::Conflict, message).with_field("name"));
    let Some(next) = table.revision(&name).and_then(|served| served.next.as_ref()) else {
        return conflict(format!("The model of `{name}` is not being changed; there is nothing to promote."));
    };
    let Some(revision) = next.revision else {
        let (model, engine) = (&next.spec.model, next.spec.engine);
        return conflict(format!(
            "No replica of the next model of `{name}` ({model}, {} {}) is ready yet; `meridian get rollout {name}` shows \
             its replicas.",
            engine.kind, engine.precision
        ));
    };
    let Some(entry) = api.store.get(keys::DEPLOYMENTS).await? else {
        return conflict("No deployments are applied yet.".to_owned());
    };
    let mut wanted = records::wanted(&entry)?;
    let promoted = PromotedV1 { name: name.to_string(), revision: revision.to_string() };
    if wanted.promotions.promoted.insert(name.clone(), revision) == Some(revision) {
        return Ok(Json(promoted));
    }
    let value = records::packed(&DeploymentsV1::from(&wanted));
    let when = vec![Compare::ModRevision(keys::DEPLOYMENTS.to_owned(), entry.mod_revision)];
    let then = vec![Op::Put { key: keys::DEPLOYMENTS.to_owned(), value, lease: None }];
    if !api.store.txn(Txn { when, then }).await?.succeeded {
        return conflict(
            "Another operator has applied a change at the same time; review it and promote again.".to_owned(),
        );
    }
    Promoted { deployment: &name, revision }.emit();
    Ok(Json(promoted))
}
