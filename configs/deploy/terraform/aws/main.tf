# One machine in a region of AWS, reachable by the fleet (spoke) and by clients (gateway).

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

variable "image" {
  type = string
}

variable "subnet" {
  type = string
}

variable "fleet_networks" {
  type = list(string)
}

variable "client_networks" {
  type = list(string)
}

variable "user_data" {
  type      = string
  sensitive = true
}

data "aws_subnet" "this" {
  id = var.subnet
}

resource "aws_security_group" "this" {
  name   = "meridian"
  vpc_id = data.aws_subnet.this.vpc_id

  ingress {
    description = "Gateways and spokes"
    protocol    = "tcp"
    from_port   = 7100
    to_port     = 7100
    cidr_blocks = var.fleet_networks
  }

  ingress {
    description = "Clients"
    protocol    = "tcp"
    from_port   = 8080
    to_port     = 8080
    cidr_blocks = var.client_networks
  }

  egress {
    description = "Hub, spokes of other regions, sources of models"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_instance" "this" {
  ami                         = var.image
  instance_type               = "c7i.xlarge"
  subnet_id                   = var.subnet
  vpc_security_group_ids      = [aws_security_group.this.id]
  associate_public_ip_address = true
  user_data                   = var.user_data

  # The token of the user data is used once; the metadata service needs a session.
  metadata_options {
    http_tokens = "required"
  }

  root_block_device {
    volume_size = 50
    encrypted   = true
  }
}

output "address" {
  value = aws_instance.this.public_ip
}
