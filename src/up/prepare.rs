//! A world before it runs: its ports are reserved and the configuration of every process is written.

use super::etcd::Etcd;
use super::files::{Door, Files, Front, state_dir};
use super::identities::Authority;
use super::plan::Plan;
use super::ports::Ports;
use super::process::Spec;
use super::world::{Place, World};
use crate::cli::{StoreKind, UpOptions};
use anyhow::{Context, Result};
use regions::deployment::Deployment;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;

impl World {
    /// Reserves the ports and writes every configuration.
    pub(crate) fn prepare(options: &UpOptions, plan: &Plan, tell: fn(&str)) -> Result<World> {
        let mut ports = Ports::default();
        let gateway_address = ports.reserve(options.port).with_context(|| {
            format!("port {} is taken; choose another with --port, or stop whoever has it", options.port)
        })?;
        let dir = match &options.dir {
            Some(dir) => dir.clone(),
            None => state_dir()?.join(format!("up-{}", gateway_address.port())),
        };
        let files = Files { dir };
        fs::create_dir_all(files.logs())
            .with_context(|| format!("{} cannot be made", files.logs().display()))?;
        let files = Files { dir: files.dir.canonicalize()? };
        let operations = ports.reserve(0)?;
        let control = ports.reserve(0)?;
        let hub_addresses = (0..plan.hubs).map(|_| ports.reserve(0)).collect::<std::io::Result<Vec<_>>>()?;
        let etcd = match options.store {
            StoreKind::Embedded => None,
            StoreKind::Etcd => Some(Etcd::prepare(&files, &mut ports)?),
        };
        let mut hubs = Vec::new();
        for (number, address) in hub_addresses.iter().enumerate() {
            hubs.push((files.hub(plan, number, *address, etcd.as_ref())?, *address));
        }
        let place = plan.regions.first().context("no region")?.clone();
        let authority = Authority::begin(files.dir.join("identities"))?;
        let mut places = Vec::new();
        for (at, region) in plan.regions.iter().enumerate() {
            let (_, round_trip) = plan.apart(&place, region);
            let (listen, advertise, operations) = (ports.reserve(0)?, ports.reserve(0)?, ports.reserve(0)?);
            let starts_at = match plan.follows_traffic() {
                true => Some(ports.range(plan.replicas_max(region))?),
                false => None,
            };
            let replicas = match starts_at {
                Some(_) => Vec::new(),
                None => replicas(&files, plan, at, &mut ports)?,
            };
            let behind: Vec<_> = replicas.iter().map(|(_, address)| *address).collect();
            let door = Door {
                listen,
                advertise,
                operations,
                hubs: &hub_addresses,
                replicas: &behind,
                starts_at,
                authority: &authority,
            };
            let spoke = files.spoke(plan, region, &door)?;
            let (region, one_way) = (region.clone(), round_trip / 2);
            let (spoke_address, link_address) = (listen, advertise);
            places.push(Place { region, spoke, spoke_address, operations, link_address, one_way, replicas });
        }
        let certificate = options.tls.then(|| files.certificate()).transpose()?;
        let (key, shown) = (options.key.as_str(), certificate.as_ref());
        let authority = &authority;
        let front = Front { listen: gateway_address, operations, key, certificate: shown, authority };
        let gateway = files.gateway(plan, &place, &hub_addresses, &front)?;
        Ok(World {
            etcd,
            hubs,
            gateway: (gateway, gateway_address),
            certificate: certificate.map(|made| made.certificate),
            operator_token: files.operator_token()?,
            operations,
            control,
            places,
            ports,
            running: Vec::new(),
            orders: None,
            processes: Arc::default(),
            tell,
        })
    }
}

/// The replicas of one region.
fn replicas(files: &Files, plan: &Plan, at: usize, ports: &mut Ports) -> Result<Vec<(Spec, SocketAddr)>> {
    let region = &plan.regions[at];
    let by_model = plan.replicas(region);
    let names = |deployments: &[&Deployment]| -> Vec<String> {
        deployments.iter().map(|deployment| deployment.name.to_string()).collect()
    };
    let mut replicas = Vec::new();
    match &plan.scripted {
        Some(scripted) => {
            let all: Vec<&Deployment> = by_model.into_values().flatten().collect();
            for number in 0..scripted.replicas.get(at).copied().unwrap_or(1) as usize {
                let address = ports.reserve(0)?;
                let names = names(&all);
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                replicas.push((files.scripted(region, number, address, scripted, &names), address));
            }
        }
        None => {
            for (number, (runs, deployments)) in by_model.into_iter().enumerate() {
                let address = ports.reserve(0)?;
                let names = names(&deployments);
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                replicas.push((files.replica(region, number, address, runs, &names)?, address));
            }
        }
    }
    Ok(replicas)
}
