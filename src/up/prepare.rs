//! Preparation of a local fleet: reserves its ports and writes the configuration of every process.

use super::authority::FleetAuthority;
use super::certificates;
use super::etcd::EtcdCluster;
use super::files::{
    FleetFiles, GatewaySettings, HubSettings, ReplicaPlace, SpokeSettings, source_address, state_dir,
};
use super::fleet::{
    LocalFleet, PreparedGateway, PreparedHub, PreparedRegion, PreparedReplica, PreparedSpoke,
};
use super::link::LinkDelays;
use super::plan::{FleetPlan, SPAWNED_MAX};
use super::ports::Ports;
use super::targets;
use crate::cli::{StoreKind, UpOptions};
use anyhow::{Context, Result};
use regions::deployment::Deployment;
use regions::id::RegionId;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

impl LocalFleet {
    /// Reserves the ports and writes every configuration.
    pub(crate) fn prepare(options: &UpOptions, plan: &FleetPlan, print: fn(&str)) -> Result<LocalFleet> {
        let mut ports = Ports::of(match options.ipv6 {
            true => Ipv6Addr::LOCALHOST.into(),
            false => Ipv4Addr::LOCALHOST.into(),
        });
        let gateway_address = ports.reserve(options.port).with_context(|| {
            format!(
                "port {} is in use; choose another with --port, or stop the process that uses it",
                options.port
            )
        })?;
        let dir = match &options.dir {
            Some(dir) => dir.clone(),
            None => state_dir()?.join(format!("up-{}", gateway_address.port())),
        };
        let files = FleetFiles { dir };
        fs::create_dir_all(files.logs())
            .with_context(|| format!("{} cannot be created", files.logs().display()))?;
        let files = FleetFiles { dir: files.dir.canonicalize()? };
        let (control, console) = (ports.reserve(0)?, ports.reserve(0)?);
        let hub_addresses = (0..plan.hubs).map(|_| ports.reserve(0)).collect::<std::io::Result<Vec<_>>>()?;
        let etcd = match options.store {
            StoreKind::Embedded => None,
            StoreKind::Etcd => Some(EtcdCluster::prepare(&files.dir, &files.logs(), &mut ports)?),
        };
        let gateway_region = plan.regions.first().context("no region")?.clone();
        let authority_addresses =
            (0..plan.hubs).map(|_| ports.reserve(0)).collect::<std::io::Result<Vec<_>>>()?;
        let authority =
            FleetAuthority::create(&files.dir, &gateway_region, &plan.catalogue, authority_addresses)?;
        let mut hubs = Vec::new();
        for (number, address) in hub_addresses.iter().enumerate() {
            let operations = ports.reserve(0)?;
            let settings = HubSettings {
                number,
                listen: *address,
                operations,
                console: (number == 0).then_some((console, control)),
                etcd: etcd.as_ref(),
                authority: &authority,
            };
            hubs.push(PreparedHub { spec: files.hub(plan, &settings)?, address: *address, operations });
        }
        let mut regions = Vec::new();
        for (index, region) in plan.regions.iter().enumerate() {
            let delays = link_delays(plan, region, gateway_address.ip());
            let replicas = match plan.is_autoscaled() {
                true => Vec::new(),
                false => replicas(&files, plan, index, &mut ports, &authority)?,
            };
            let replica_addresses: Vec<_> = replicas.iter().map(|replica| replica.address).collect();
            let mut spokes = Vec::new();
            for number in 0..plan.spokes {
                let (listen, advertise, operations) =
                    (ports.reserve(0)?, ports.reserve(0)?, ports.reserve(0)?);
                let replica_ports = match plan.is_autoscaled() {
                    true => Some(ports.range(SPAWNED_MAX)?),
                    false => None,
                };
                let settings = SpokeSettings {
                    number,
                    listen,
                    advertise,
                    operations,
                    hubs: &hub_addresses,
                    replicas: &replica_addresses,
                    replica_ports,
                    authority: &authority,
                };
                let spec = files.spoke(plan, region, &settings)?;
                spokes.push(PreparedSpoke { spec, address: listen, operations, link_address: advertise });
            }
            regions.push(PreparedRegion { region: region.clone(), spokes, delays, replicas });
        }
        let certificate = options.tls.then(|| certificates::self_signed(&files.dir)).transpose()?;
        let (key, for_clients) = (options.key.as_str(), certificate.as_ref());
        let mut gateways = Vec::new();
        for (number, region) in plan.gateway_regions().iter().enumerate() {
            let listen = if number == 0 { gateway_address } else { ports.reserve(0)? };
            let operations = ports.reserve(0)?;
            let authority = &authority;
            let settings =
                GatewaySettings { number, listen, operations, key, certificate: for_clients, authority };
            let spec = files.gateway(plan, region, &hub_addresses, &settings)?;
            gateways.push(PreparedGateway { spec, region: region.clone(), address: listen, operations });
        }
        let targets = targets::of(&gateway_region, &hubs, &gateways, &regions);
        Ok(LocalFleet {
            targets: files.targets(&targets)?,
            hubs,
            gateways,
            certificate: certificate.map(|made| made.certificate),
            webhook_secrets: files.webhook_secrets()?,
            embedded_data: etcd.is_none().then(|| files.hub_data()),
            etcd,
            authority,
            control,
            console,
            regions,
            ports,
            running: Vec::new(),
            commands: None,
            processes: Arc::default(),
            drills: None,
            print,
        })
    }
}

/// Returns the delays of the links to a region, by gateway. Other processes are where the first gateway is.
fn link_delays(plan: &FleetPlan, region: &RegionId, loopback: IpAddr) -> LinkDelays {
    let one_way = |gateway: &RegionId| plan.distance(gateway, region).1 / 2;
    let gateways = plan.gateway_regions().iter().enumerate();
    let by_source =
        gateways.filter_map(|(number, gateway)| Some((source_address(number, loopback)?, one_way(gateway))));
    LinkDelays { other: one_way(&plan.regions[0]), by_source: by_source.collect() }
}

/// Prepares the replicas of one region.
fn replicas(
    files: &FleetFiles,
    plan: &FleetPlan,
    index: usize,
    ports: &mut Ports,
    authority: &FleetAuthority,
) -> Result<Vec<PreparedReplica>> {
    let region = &plan.regions[index];
    let by_model = plan.replicas(region);
    let names = |deployments: &[&Deployment]| -> Vec<String> {
        deployments.iter().map(|deployment| deployment.name.to_string()).collect()
    };
    let mut replicas = Vec::new();
    match &plan.scripted {
        Some(scripted) => {
            let all: Vec<&Deployment> = by_model.into_values().flatten().collect();
            let names = names(&all);
            for number in 0..scripted.replicas.get(index).copied().unwrap_or(1) as usize {
                let (listen, operations) = (ports.reserve(0)?, ports.reserve(0)?);
                let place = ReplicaPlace { region, number, listen, operations, names: &names, authority };
                let spec = files.scripted(plan, &place, scripted)?;
                replicas.push(PreparedReplica { spec, address: listen, operations, deployment: None });
            }
        }
        None => {
            for (number, (runs, deployments)) in by_model.into_iter().enumerate() {
                let (listen, operations) = (ports.reserve(0)?, ports.reserve(0)?);
                let names = names(&deployments);
                let place = ReplicaPlace { region, number, listen, operations, names: &names, authority };
                let spec = files.replica(plan, &place, runs)?;
                let deployment = names.first().cloned();
                replicas.push(PreparedReplica { spec, address: listen, operations, deployment });
            }
        }
    }
    Ok(replicas)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser;

    /// The emulated world must not make a caller faster when its region is lost.
    #[test]
    fn every_gateway_is_nearest_to_its_own_region() {
        let CliCommand::Up(options) = Cli::parse_from(["meridian", "up", "--regions", "12"]).command else {
            panic!("the command is up");
        };
        let plan = FleetPlan::check(&options).map_err(|problems| problems.join("\n")).unwrap();
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        let delays: Vec<_> = plan.regions.iter().map(|region| link_delays(&plan, region, loopback)).collect();
        for (number, near) in plan.regions.iter().enumerate() {
            assert_eq!(plan.nearest_gateway(near), number, "{near}");
            let source = source_address(number, loopback).unwrap_or(loopback);
            let to = |region: usize| delays[region].one_way(source);
            for (other, far) in plan.regions.iter().enumerate().filter(|(other, _)| *other != number) {
                assert!(to(number) < to(other), "{near} is nearer to its gateway than {far}");
            }
        }
    }
}
