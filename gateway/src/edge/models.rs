//! Model lists: the deployments that a tenant may use.

use super::view::View;
use gateway_core::tenant::Tenant;
use regions::deployment::Deployment;
use serde_json::{Value, json};

/// `GET /v1/models`.
pub(super) fn list(view: &View, tenant: &Tenant) -> Vec<u8> {
    let data: Vec<Value> = view.deployments_for(tenant).map(model).collect();
    json!({"object": "list", "data": data}).to_string().into_bytes()
}

/// `GET /v1/models/{id}`.
pub(super) fn one(deployment: &Deployment) -> Vec<u8> {
    model(deployment).to_string().into_bytes()
}

/// `GET /infinity/models`: the client of Infinity requires `stats` and this owner.
pub(super) fn list_for_infinity(view: &View, tenant: &Tenant) -> Vec<u8> {
    let model = |deployment: &Deployment| {
        let mut model = model(deployment);
        model["owned_by"] = "infinity".into();
        model["stats"] = json!({});
        model["backend"] = "meridian".into();
        model
    };
    let data: Vec<Value> = view.deployments_for(tenant).map(model).collect();
    json!({"object": "list", "data": data}).to_string().into_bytes()
}

fn model(deployment: &Deployment) -> Value {
    json!({"id": deployment.name.as_str(), "object": "model", "created": 0, "owned_by": "meridian"})
}
