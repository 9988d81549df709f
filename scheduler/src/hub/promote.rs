//! Lets the next model of a deployment replace the one that is served, where it waits for an operator.
//!
//! What is written is the revision that was promoted, not the name alone: replicas of a third revision that come later are not
//! served because of it. Whoever leads carries it out ([`scheduler_core::revisions`]), as soon as the replicas are ready.

use regions::DeploymentName;
use scheduler_core::wire::deployment::{DeploymentsV1, PromotedV1};
use scheduler_core::wire::keys;
use scheduler_store::{Compare, Op, Store, Txn};

use super::http::Desk;
use super::records;
use super::spokes::refusal;
use crate::events::Promoted;
use crate::respond::{Code, Refusal};

/// Promotes the next model of a deployment.
pub(super) async fn promote<S: Store>(desk: &Desk<S>, name: DeploymentName) -> Result<PromotedV1, Refusal> {
    let published = desk.current.borrow().clone();
    let not_yet = || Refusal::new(Code::NotReady, "No route table has been published yet.");
    let table = &published.as_ref().ok_or_else(not_yet)?.table;
    if !table.deployments.contains_key(&name) {
        let message = format!("No deployment is called `{name}`: `meridian get deployments` lists them.");
        return Err(Refusal::new(Code::NotFound, message).of("name"));
    }
    let conflict = |message: String| Err(Refusal::new(Code::Conflict, message).of("name"));
    let Some(next) = table.revision(&name).and_then(|served| served.next.as_ref()) else {
        return conflict(format!(
            "No change of the model of `{name}` is under way: there is nothing to promote."
        ));
    };
    let Some(revision) = next.revision else {
        let (model, engine) = (&next.spec.model, next.spec.engine);
        return conflict(format!(
            "No replica of the next model of `{name}` ({model}, {} {}) is ready yet; `meridian get rollout {name}` shows \
             its replicas.",
            engine.kind, engine.precision
        ));
    };
    let entry = desk.store.get(keys::DEPLOYMENTS).await.map_err(refusal)?;
    let Some(entry) = entry else {
        return conflict("Nothing was applied yet.".to_owned());
    };
    let unreadable = |error: records::RecordError| Refusal::new(Code::StoreUnavailable, error.to_string());
    let mut wanted = records::wanted(&entry).map_err(unreadable)?;
    let promoted = PromotedV1 { name: name.to_string(), revision: revision.to_string() };
    if wanted.orders.promoted.insert(name.clone(), revision) == Some(revision) {
        return Ok(promoted);
    }
    let value = records::packed(&DeploymentsV1::from(&wanted));
    let when = vec![Compare::ModRevision(keys::DEPLOYMENTS.to_owned(), entry.mod_revision)];
    let then = vec![Op::Put { key: keys::DEPLOYMENTS.to_owned(), value, lease: None }];
    if !desk.store.txn(Txn { when, then }).await.map_err(refusal)?.succeeded {
        return conflict(
            "Another operator has applied something in this moment; look at it, and promote again."
                .to_owned(),
        );
    }
    Promoted { deployment: &name, revision }.emit();
    Ok(promoted)
}
