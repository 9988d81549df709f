//! Promotion of the next model of a deployment, where the deployment waits for an operator.
//!
//! The record names the promoted revision, not only the deployment: replicas of a third revision that appear later are
//! not served because of it. The leader switches ([`scheduler_core::revisions`]) as soon as the replicas are ready.

use regions::DeploymentName;
use scheduler_api::deployment::{DeploymentsV1, PromotedV1};
use scheduler_api::keys;
use scheduler_store::{Compare, Op, Store, Txn};

use super::http::HubApi;
use super::records;
use super::spokes::store_error;
use crate::events::Promoted;
use crate::respond::{Code, ErrorResponse};

/// Promotes the next model of a deployment.
pub(super) async fn promote<S: Store>(
    api: &HubApi<S>,
    name: DeploymentName,
) -> Result<PromotedV1, ErrorResponse> {
    let published = api.current.borrow().clone();
    let not_yet = || ErrorResponse::new(Code::NotReady, "No route table has been published yet.");
    let table = &published.as_ref().ok_or_else(not_yet)?.table;
    if !table.deployments.contains_key(&name) {
        let message = format!("There is no deployment `{name}`; `meridian get deployments` lists them.");
        return Err(ErrorResponse::new(Code::NotFound, message).with_field("name"));
    }
    let conflict = |message: String| Err(ErrorResponse::new(Code::Conflict, message).with_field("name"));
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
    let entry = api.store.get(keys::DEPLOYMENTS).await.map_err(store_error)?;
    let Some(entry) = entry else {
        return conflict("No deployments are applied yet.".to_owned());
    };
    let unreadable =
        |error: records::RecordError| ErrorResponse::new(Code::StoreUnavailable, error.to_string());
    let mut wanted = records::wanted(&entry).map_err(unreadable)?;
    let promoted = PromotedV1 { name: name.to_string(), revision: revision.to_string() };
    if wanted.orders.promoted.insert(name.clone(), revision) == Some(revision) {
        return Ok(promoted);
    }
    let value = records::packed(&DeploymentsV1::from(&wanted));
    let when = vec![Compare::ModRevision(keys::DEPLOYMENTS.to_owned(), entry.mod_revision)];
    let then = vec![Op::Put { key: keys::DEPLOYMENTS.to_owned(), value, lease: None }];
    if !api.store.txn(Txn { when, then }).await.map_err(store_error)?.succeeded {
        return conflict(
            "Another operator has applied a change at the same time; review it and promote again.".to_owned(),
        );
    }
    Promoted { deployment: &name, revision }.emit();
    Ok(promoted)
}
